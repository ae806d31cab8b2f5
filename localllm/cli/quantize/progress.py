"""Show the progress of `quantize`, and end it on a signal."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from localllm.cli.draw.output import is_terminal, note
from localllm.cli.draw.words import duration
from localllm.errors import ExitCode

if TYPE_CHECKING:
    from localllm.quantize.estimate import StageSeconds
    from localllm.quantize.run import Progress

# Lines of one stage come no more often than this.
_LINES_APART_S = 5.0
# From so many steps on, those done say how long the others take.
_MANY_STEPS = 3


@contextmanager
def progress_bar(expected: "StageSeconds") -> Iterator["Progress"]:
    """A bar for each stage on stderr if that is a terminal, otherwise a line now and then; both say
    about how long the whole run still takes.

    A signal ends the process at once: every file in the work folder is complete, and an exception
    raised in the middle of a library might be turned into another one.
    """
    clock = Clock(expected)
    if not is_terminal(sys.stderr):
        with _Stop(lambda: None).handles_signals():
            yield _Lines(clock).show
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Left(ProgressColumn):
        """How long the whole run still takes, behind the stage at work."""

        def render(self, task: Task) -> Text:
            return Text("" if task.finished else str(clock))

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        Left(),
        TextColumn("{task.fields[remark]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, Any] = {}

        def show(stage: str, done: int, total: int, remark: str) -> None:
            clock.note(stage, done, total)
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, remark=remark)
            bar.update(tasks[stage], completed=done, total=total, remark=remark)

        with _Stop(bar.stop).handles_signals():
            yield show


class Clock:
    """Estimates how long a run still takes: by the steps done of a stage with many, else by what
    was expected of it.
    """

    def __init__(self, expected: "StageSeconds", now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._left_s = expected.named()
        self._first: dict[str, tuple[float, int]] = {}
        self._noted_s = now()

    def note(self, stage: str, done: int, total: int) -> None:
        """`done` of the `total` steps of a stage are done."""
        self._noted_s = self._now()
        first_s, before = self._first.get(stage, (0.0, 0))
        if before == 0:  # the first step includes loading
            self._first[stage] = first_s, before = self._noted_s, done
        if total >= _MANY_STEPS and done > before:
            self._left_s[stage] = (self._noted_s - first_s) / (done - before) * (total - done)
        elif done == total:
            self._left_s[stage] = 0.0

    def left_s(self) -> float:
        """Seconds that are left, about."""
        return max(0.0, sum(self._left_s.values()) - (self._now() - self._noted_s))

    def __str__(self) -> str:
        return f"about {duration(max(1.0, self.left_s()))} left"


class _Lines:
    """Progress as lines, the first and the last of each stage among them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._written_s: dict[str, float] = {}

    def show(self, stage: str, done: int, total: int, remark: str) -> None:
        """A Progress."""
        self._clock.note(stage, done, total)
        now = time.monotonic()
        since = now - self._written_s.get(stage, float("-inf"))
        if total == 1 or (done < total and since < _LINES_APART_S):
            return
        self._written_s[stage] = now
        note(f"{stage} {done:,}/{total:,} {remark}".rstrip() + f", {self._clock}")


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
