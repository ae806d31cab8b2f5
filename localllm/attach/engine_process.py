"""The engine in a process of its own: `python -m localllm.attach.engine_process FD`."""

import logging
import os
import signal
import socket
import sys

from localllm.process.late_import import OF_COMPILERS, import_late


def main() -> int:
    """Run the process; returns its exit code."""
    # Signals that end the server may reach this process too, which must end only after it.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    import_late(OF_COMPILERS)
    from localllm.attach.engine_service import serve_engine

    return serve_engine(socket.socket(fileno=int(sys.argv[1])))


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    # Not by way of the interpreter's end: it stops daemon threads wherever they are, and one within
    # torch then aborts the process ("terminate called without an active exception").
    os._exit(code)
