"""The terminal: hold back typed keys while an answer streams, and ask its user to confirm."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from localllm.cli.draw.output import is_terminal, write_stderr
from localllm.errors import RequestError


@contextmanager
def keys_held() -> Iterator[None]:
    """Keep typed keys from being echoed into the answer; the line editor reads them afterwards.

    Ctrl-C still interrupts. The terminal's settings are restored, whatever happens inside.
    """
    try:
        import termios
    except ImportError:  # no POSIX terminal
        yield
        return
    if not is_terminal(sys.stdin):
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    held = termios.tcgetattr(descriptor)
    held[0] &= ~termios.ICRNL  # Enter stays the key that the line editor expects
    held[3] &= ~(termios.ECHO | termios.ICANON)
    held[3] |= termios.NOFLSH  # Ctrl-C does not discard typed keys
    termios.tcsetattr(descriptor, termios.TCSANOW, held)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def may_delete(what: str, is_agreed: bool, size_text: str = "") -> bool:
    """Whether `what` may be deleted: agreed beforehand (`--yes`) or confirmed on the terminal.

    Raises: RequestError if stdin is not a terminal, so that nobody can confirm.
    """
    if is_agreed:
        return True
    if not is_terminal(sys.stdin):
        raise RequestError(
            f"stdin is not a terminal, so nobody can confirm deleting {what}", hint="--yes"
        )
    more = f", {size_text}" if size_text else ""
    if confirm(f"delete {what}{more}? [y/N] ", default=False):
        return True
    write_stderr("nothing was deleted\n")
    return False


def confirm(question: str, *, default: bool) -> bool:
    """Ask a yes-or-no question on the terminal; Enter gives the default.

    Ctrl-C, Ctrl-D and anything but `y` or `yes` mean no.
    """
    write_stderr(question)
    try:
        answer = sys.stdin.readline()
    except KeyboardInterrupt:
        write_stderr("\n")
        return False
    if not answer:
        write_stderr("\n")
        return False
    word = answer.strip().lower()
    return default if not word else word in ("y", "yes")
