"""The command, as `localllm` and as `python -m localllm`."""

import os
import signal
from types import FrameType

_SIGINT_EXIT = 130  # errors.py has the table, which is an import away


def main() -> None:
    """Run it. Ctrl-C ends the program at once while it is still being imported: an exception out
    of the middle of an import ends in odd ways, and nothing is lost by leaving.
    """
    signal.signal(signal.SIGINT, _leave)
    from localllm.cli.main import main as run

    run()


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(_SIGINT_EXIT)


if __name__ == "__main__":
    main()
