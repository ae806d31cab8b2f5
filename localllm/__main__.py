"""The entry point of `localllm` and `python -m localllm`."""

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
    from localllm.cli.main import main as run

    run()


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(_SIGINT_EXIT)


if __name__ == "__main__":
    main()
