"""Show the progress of `quantize`, and end it on a signal."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        with _leaving_on_signals(lambda: None):
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

        with _leaving_on_signals(bar.stop):
            yield show


@contextmanager
def _leaving_on_signals(tidy_up: Callable[[], None]) -> Iterator[None]:
    def leave(signum: int, frame: object) -> None:
        tidy_up()
        note("stopped; the same command with --resume continues at the last whole layer")
        os._exit(ExitCode.SIGINT if signum == signal.SIGINT else ExitCode.SIGTERM)

    previous = {signum: signal.signal(signum, leave) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)


def _note_stage(stage: str, done: int, total: int, remark: str) -> None:
    if done == total or stage == "layers":
        note(f"{stage} {done}/{total} {remark}".rstrip())
