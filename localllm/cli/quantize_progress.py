"""How far `quantize` is, and how a signal ends it."""

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
    """A bar on stderr where that is a terminal, else a line a stage.

    A signal ends the process at once: whatever is in the work folder is whole, and an exception
    out of the middle of a library may end as another one.
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
        note("stopped; the same command with --resume goes on at the last whole layer")
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
