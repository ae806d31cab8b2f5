"""The terminal itself: keys that wait while an answer streams, and a question to its user."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from localllm.cli.output import is_terminal, write_stderr
from localllm.errors import RequestError


@contextmanager
def keys_held() -> Iterator[None]:
    """Keep typed keys from being echoed into the answer; the line editor reads them afterwards.

    Ctrl-C still interrupts. The terminal is as it was afterwards, whatever happens inside.
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
    held[0] &= ~termios.ICRNL  # Enter stays what the line editor expects
    held[3] &= ~(termios.ECHO | termios.ICANON)
    held[3] |= termios.NOFLSH  # Ctrl-C throws away nothing that was typed
    termios.tcsetattr(descriptor, termios.TCSANOW, held)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSANOW, before)


def may_delete(what: str, is_agreed: bool, size_text: str = "") -> bool:
    """Whether it may go: agreed beforehand (`--yes`), or on the terminal.

    Raises: RequestError where nobody can be asked.
    """
    if is_agreed:
        return True
    if not is_terminal(sys.stdin):
        raise RequestError(f"nobody can be asked whether {what} may go", hint="--yes")
    more = f", {size_text}" if size_text else ""
    if confirm(f"delete {what}{more}? [y/N] ", default=False):
        return True
    write_stderr("nothing was deleted\n")
    return False


def confirm(question: str, *, default: bool) -> bool:
    """Ask on the terminal; Enter is the default, Ctrl-C, Ctrl-D and anything else are no."""
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
