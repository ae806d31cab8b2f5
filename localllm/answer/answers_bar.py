"""A bar on stderr while a Python program waits for answers."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# (answers that are done, answers in all, tokens of the next one)
Watch = Callable[[int, int, int], None]
_APART_S = 0.1


@contextmanager
def answers_bar(*, is_shown: bool | None = None) -> Iterator[Watch]:
    """A Watch that draws a bar, and takes it away at the end; `is_shown` None: on a terminal."""
    if is_shown is None:
        is_shown = sys.stderr is not None and sys.stderr.isatty()
    if not is_shown:
        yield lambda done, total, num_tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=Console(stderr=True, force_terminal=True), transient=True
    ) as bar:
        task = bar.add_task("reading", total=None)
        drawn_s = 0.0

        def watch(done: int, total: int, num_tokens: int) -> None:
            nonlocal drawn_s
            now = time.monotonic()
            if now - drawn_s < _APART_S:
                return
            drawn_s = now
            counted = f"{done:,} of {total:,} answers, " if total > 1 else ""
            said = f"{counted}{num_tokens:,} tokens"
            bar.update(task, description=said, completed=done, total=total if total > 1 else None)

        yield watch
