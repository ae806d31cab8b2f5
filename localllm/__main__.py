"""The entry point of `localllm` and `python -m localllm`."""

import gc
import os
import signal
from types import FrameType

_SIGINT_EXIT = 130  # as in the table in errors.py, which would cost an import


def main() -> None:
    """Run the command line.

    While modules are still being imported, Ctrl-C exits at once: an exception in the middle of an
    import fails in odd ways, and nothing is lost by exiting.
    """
    signal.signal(signal.SIGINT, _leave)
    # What is imported stays: to look through it for garbage would take a tenth of the time.
    gc.disable()
    from localllm.cli.main import main as run

    gc.freeze()
    gc.enable()
    run()


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(_SIGINT_EXIT)


if __name__ == "__main__":
    main()
