"""Show the progress of a download: bars on a terminal, one line elsewhere."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from localllm.cli.draw.interrupt import ctrl_c_raises
from localllm.cli.draw.output import is_terminal, may_use_colour, note, show_controls
from localllm.cli.draw.words import size
from localllm.hub.download import DownloadProgress

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from localllm.hub.transfer import HubFile

# Files that have their own bar; the others count only in the total.
_MAX_BARS = 6
# A smaller download shows nothing.
_SMALL_BYTES = 8 << 20


class TerminalProgress(DownloadProgress):
    """Draws on stderr."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._bars: dict[str, TaskID] = {}
        self._sum: TaskID | None = None
        self._done: dict[str, int] = {}

    @contextmanager
    def begin(self, what: str, files: "list[HubFile]") -> Iterator[None]:
        """Show a bar for each of the larger files and one for the total while the block runs. On
        Ctrl-C, note that nothing is lost.
        """
        with _stoppable(), self._show(what, files):
            yield

    @contextmanager
    def _show(self, what: str, files: "list[HubFile]") -> Iterator[None]:
        total = sum(file.num_bytes for file in files)
        if total < _SMALL_BYTES:
            yield
            return
        names = f"{len(files)} file{'s' * (len(files) > 1)}"
        if not is_terminal(sys.stderr):
            note(f"{what} {names}, {size(total)}")
            yield
            return
        with self._make() as self._progress:
            self._done = {file.name: 0 for file in files}
            for file in sorted(files, key=lambda file: -file.num_bytes)[:_MAX_BARS]:
                name = show_controls(file.name)
                if len(files) > 1:
                    self._bars[file.name] = self._progress.add_task(name, total=file.num_bytes)
            self._sum = self._progress.add_task(f"{what} {names}", total=total)
            try:
                yield
            finally:
                self._progress.refresh()
                self._bars, self._sum = {}, None
        self._progress = None

    def advance(self, file: "HubFile", num_bytes: int) -> None:
        """Show that `num_bytes` of `file` are done so far."""
        if self._progress is None or self._sum is None:
            return
        self._done[file.name] = num_bytes
        if file.name in self._bars:
            self._progress.update(self._bars[file.name], completed=num_bytes)
        self._progress.update(self._sum, completed=sum(self._done.values()))

    def _make(self) -> "Progress":
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True, no_color=not may_use_colour(sys.stderr))
        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            expand=True,
        )


@contextmanager
def _stoppable() -> Iterator[None]:
    """Make Ctrl-C raise an exception within the block, and note how to resume."""
    with ctrl_c_raises():
        try:
            yield
        except KeyboardInterrupt:
            note("stopped; the downloaded part is kept, and the same command resumes from there")
            raise
