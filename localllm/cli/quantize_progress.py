"""Show the progress of `quantize`, and end it on a signal."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from localllm.cli.output import is_terminal, note
from localllm.errors import ExitCode

if TYPE_CHECKING:
    from localllm.quantize.run import Progress


@contextmanager
def progress_bar() -> Iterator["Progress"]:
    """A bar on stderr if that is a terminal, otherwise one line per stage.

    A signal ends the process at once: every file in the work folder is complete, and an exception
    raised in the middle of a library might be turned into another one.
    """
    if not is_terminal(sys.stderr):
        with _Stop(lambda: None).handles_signals():
            yield _note_stage
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int, remark: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, remark=remark)
            bar.update(tasks[stage], completed=done, total=total, remark=remark)

        with _Stop(bar.stop).handles_signals():
            yield show


class _Stop:
    """Ends the process on a signal. A Speaker, for a signal that comes in a long call into C."""

    def __init__(self, tidy_up: Callable[[], None]) -> None:
        self._tidy_up = tidy_up

    @contextmanager
    def handles_signals(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM)
        previous = {number: signal.signal(number, self._leave) for number in numbers}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _leave(self, number: int, frame: FrameType | None) -> None:
        self.say_last_words()
        os._exit(ExitCode.SIGINT if number == signal.SIGINT else ExitCode.SIGTERM)

    def say_last_words(self) -> None:
        self._tidy_up()
        note("stopped; the same command with --resume continues at the last whole layer")


def _note_stage(stage: str, done: int, total: int, remark: str) -> None:
    if done == total or stage == "layers":
        note(f"{stage} {done}/{total} {remark}".rstrip())
