"""The process of an engine: `python -m localllm.attach.engine_process FD`.

It begins with its imports, which take longest and need no model: so it can be started before it is
known which model it will load.
"""

import gc
import logging
import os
import signal
import sys
from socket import socket


def main() -> int:
    """Run the process; returns its exit code."""
    # Signals that end the server may reach this process too, which must end only after it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    channel = socket(fileno=int(sys.argv[1]))
    # Imports make a million objects, nearly all of which stay. To look through them for garbage
    # again and again would take a seventh of the time.
    gc.disable()
    from localllm.attach.engine_service import run

    gc.freeze()
    gc.enable()
    return run(channel)


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Not by way of the interpreter's end: it stops daemon threads wherever they are, and one within
    # torch then aborts the process ("terminate called without an active exception").
    os._exit(code)
