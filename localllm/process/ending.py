"""Makes a program that is told to end do so soon, whatever it is doing.

Python handles a signal only between two of its own instructions, and a call into C may take
minutes. The number of the signal is also written to a pipe at once; a thread reads it there, and
ends the program if nothing else has.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Thread
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    import socket  # not needed for --help

ENDS_S = 2.0
_SAYS_S = 0.5  # for last words, which a stopped terminal never takes
_SHOW_CURSOR = b"\x1b[?25h"


def end_with(channel: "socket.socket") -> None:
    """End this process ENDS_S after the other side has closed `channel`, whatever the process is
    doing, unless it has ended by then.
    """
    hangup = select.poll()
    hangup.register(channel, getattr(select, "POLLRDHUP", select.POLLHUP))

    def watch() -> None:
        hangup.poll()
        time.sleep(ENDS_S)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


@runtime_checkable
class Patient(Protocol):
    """An object whose method handles signals, and which may take longer to end. `ends_program`:
    whether the program ends even if the object no longer handles them.
    """

    ends_program: bool

    def allowed_s(self, count: int) -> float | None:
        """Seconds until the program ends, after `count` signals; None: it continues."""


@runtime_checkable
class Speaker(Protocol):
    """An object whose method handles signals, and which tells the user something at the end."""

    def say_last_words(self) -> None:
        """Say what the handler had no time to say. Called in another thread than the handler."""


def end_in_time(codes: Mapping[int, int]) -> None:
    """Make this program end within ENDS_S of a signal, with the signal's code in `codes`.

    If the handler is a method of a Patient, that object says how long it may take; if it is one of
    a Speaker, that object speaks last, for half a second at most.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    put_back = _terminal()

    def watch() -> None:
        last, count = None, 0
        while numbers := os.read(reads, 64):
            for number in filter(codes.__contains__, numbers):
                owner = _patient(number)
                count = count + 1 if owner is not None and owner is last else 1
                last = owner
                Thread(target=end, args=(number, owner, count), daemon=True).start()

    def end(number: int, owner: Patient | None, count: int) -> None:
        allowed_s = ENDS_S if owner is None else owner.allowed_s(count)
        if allowed_s is None:
            return
        time.sleep(allowed_s)
        if owner is None or owner.ends_program or _patient(number) is owner:
            put_back()
            _let_speak(_owner(number))
            os._exit(codes[number])

    Thread(target=watch, daemon=True).start()


def _owner(number: int) -> object:
    """The object whose method handles a signal, if any."""
    return getattr(signal.getsignal(number), "__self__", None)


def _patient(number: int) -> Patient | None:
    owner = _owner(number)
    return owner if isinstance(owner, Patient) else None


def _let_speak(owner: object) -> None:
    if isinstance(owner, Speaker):
        speech = Thread(target=owner.say_last_words, daemon=True)
        speech.start()
        speech.join(_SAYS_S)


def _terminal() -> Callable[[], None]:
    """A function that restores the terminal's current state, which a line editor may change."""
    try:
        import termios

        saved = termios.tcgetattr(0)
    except Exception:  # no terminal, or a system without termios
        return lambda: None

    def put_back() -> None:
        with suppress(Exception):
            termios.tcsetattr(0, termios.TCSANOW, saved)
            if sys.stdout is not None and sys.stdout.isatty():
                os.write(1, _SHOW_CURSOR)

    return put_back
