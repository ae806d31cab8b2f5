"""A program that was told to end does so soon, whatever it is doing.

Python hears a signal between two of its own steps, and a step in C may take minutes. The system
writes the signal's number to a pipe at once; a thread reads it there, and ends the program where
nothing else has.
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
    import socket  # --help wants none

ENDS_S = 2.0
_SHOW_CURSOR = b"\x1b[?25h"


def end_with(channel: "socket.socket") -> None:
    """End this process ENDS_S after the other side of `channel` has closed it, if it has not ended
    by then, whatever it is doing.
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
    """Handles signals by a method, and may take longer than others. `ends_program`: whether the
    program ends even where it handles them no more.
    """

    ends_program: bool

    def allowed_s(self, count: int) -> float | None:
        """Seconds until the program ends, after so many signals; None: it goes on."""


def end_in_time(codes: Mapping[int, int]) -> None:
    """See that this program ends within ENDS_S of a signal, with the code in `codes`.

    Where the handler is a method of a Patient, that says how long it may take.
    """
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    signal.set_wakeup_fd(writes, warn_on_full_buffer=False)
    put_back = _terminal()

    def watch() -> None:
        last, count = None, 0
        while numbers := os.read(reads, 64):
            for number in filter(codes.__contains__, numbers):
                owner = _owner(number)
                count = count + 1 if owner is not None and owner is last else 1
                last = owner
                Thread(target=end, args=(number, owner, count), daemon=True).start()

    def end(number: int, owner: Patient | None, count: int) -> None:
        allowed_s = ENDS_S if owner is None else owner.allowed_s(count)
        if allowed_s is None:
            return
        time.sleep(allowed_s)
        if owner is None or owner.ends_program or _owner(number) is owner:
            put_back()
            os._exit(codes[number])

    Thread(target=watch, daemon=True).start()


def _owner(number: int) -> Patient | None:
    """The object whose method handles a signal, where it is a Patient."""
    owner = getattr(signal.getsignal(number), "__self__", None)
    return owner if isinstance(owner, Patient) else None


def _terminal() -> Callable[[], None]:
    """What puts the terminal back as it is now: a line editor may have changed it."""
    try:
        import termios

        saved = termios.tcgetattr(0)
    except Exception:  # no terminal, or a system without
        return lambda: None

    def put_back() -> None:
        with suppress(Exception):
            termios.tcsetattr(0, termios.TCSANOW, saved)
            if sys.stdout is not None and sys.stdout.isatty():
                os.write(1, _SHOW_CURSOR)

    return put_back
