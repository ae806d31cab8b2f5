"""Stream markdown to a terminal: finished rows are printed once and never touched again.

Only the last rows, at most six, are redrawn as the text grows, at most 15 times a second. A row
leaves this live region once no later text can change it. To find out, the last block is rendered
with every ending that could change it (closing emphasis, a link); a row on which all renderings
agree is final. So the final screen equals that of the whole text rendered at once.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from localllm.cli.draw.markdown import Block, MarkdownRenderer, Row, split_blocks

MAX_LIVE_ROWS = 6
MIN_DRAW_INTERVAL_S = 1 / 15
# Drawing takes at most this share of the time, however long a block gets.
MAX_DRAW_SHARE = 0.1
# Endings that could change how earlier text renders: one more mark, or several in a row, each
# closing what was opened before the last.
_MARKS = ("*", "**", "***", "_", "__", "`", "``", "~~", "](x)", "\\)", "\\]")
_CLOSERS = (*_MARKS, *(f"x{mark}" * 6 for mark in _MARKS), "x*x**" * 4)


class MarkdownPrinter:
    """Prints pieces of a markdown text as they come.

    `write` receives the terminal output as text; `clock` returns seconds.
    """

    def __init__(
        self,
        write: Callable[[str], None],
        renderer: MarkdownRenderer,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._renderer = renderer
        self._clock = clock
        self._source = ""  # from the first unfinished block on
        self._width = 0  # the unfinished block keeps the width it began with
        self._num_printed = 0  # rows of the unfinished block that are final
        self._has_printed = False
        self._first: Block | None = None  # the block that the source was cut before
        self._live: list[Row] = []
        self._next_draw_s = 0.0

    def continue_behind(self, said: str) -> None:
        """See TextPrinter."""
        blocks = split_blocks(said)
        if blocks:
            lines = said.split("\n")[blocks[-1].first_line :]
            self._source, self._first = "\n".join(lines), blocks[-1]

    def push(self, piece: str) -> None:
        """Add `piece`, and draw if a draw is due."""
        self._source += piece
        started = self._clock()
        if started >= self._next_draw_s:
            self._draw(is_last=False)
            ended = self._clock()
            pause = max(MIN_DRAW_INTERVAL_S, (ended - started) / MAX_DRAW_SHARE)
            self._next_draw_s = ended + pause

    def finish(self) -> None:
        """Print what is left; this leaves the cursor at the start of a row."""
        self._draw(is_last=True)

    def _draw(self, *, is_last: bool) -> None:
        size = shutil.get_terminal_size()
        blocks = split_blocks(self._source, self._first)
        final: list[Row] = []
        while blocks and (is_last or len(blocks) > 1):
            final += self._final_rows(blocks.pop(0), size.columns)
        live: list[Row] = []
        if blocks:
            # `first_line` counts lines of the old source; what is left becomes the new source.
            lines = self._source.split("\n")[blocks[0].first_line :]
            self._source = "\n".join(lines)
            if blocks[0].first_line:
                self._first = blocks[0]
            [block] = split_blocks(self._source, self._first)
            settled, live = self._unfinished_rows(block, size.columns, size.lines)
            final += settled
        elif is_last:
            self._source = ""
        self._replace_live(final, live, size.columns)

    def _final_rows(self, block: Block, columns: int) -> list[Row]:
        """The rows of a complete block that are not printed yet."""
        rows = self._rows(block, columns)[self._num_printed :]
        rows = self._with_space_before(rows, block)
        self._num_printed, self._width = 0, 0
        return rows

    def _unfinished_rows(
        self, block: Block, columns: int, lines: int
    ) -> tuple[list[Row], list[Row]]:
        """The rows of the last block that have become final, and those that are live."""
        limit = max(1, min(MAX_LIVE_ROWS, lines - 1))
        rows = self._rows(block, columns)[self._num_printed :]
        settled: list[Row] = []
        if sum(row.height(columns) for row in rows) > limit and not block.is_in_place:
            num_settled = self._num_settled(block, rows)
            while num_settled and sum(row.height(columns) for row in rows) > limit:
                settled.append(rows.pop(0))
                num_settled -= 1
        live: list[Row] = []
        for row in reversed(rows):  # they exceed the limit only while none is final
            if sum(each.height(columns) for each in [*live, row]) > limit:
                break
            live.insert(0, row)
        if settled:
            settled_rows = self._with_space_before(settled, block)
            self._num_printed += len(settled)
            self._width = self._width or columns
            return settled_rows, live
        # The empty row before the block is live too, as long as there is room.
        height = sum(row.height(columns) for row in live)
        begins = self._has_printed and not self._num_printed and not block.follows_item
        if begins and height < limit:
            live.insert(0, Row("", 0))
        return [], live

    def _num_settled(self, block: Block, rows: Sequence[Row]) -> int:
        """How many of the leading `rows` no later text can change."""
        if block.is_code:
            return len(rows) - 1
        text = self._source.rstrip("\n")
        variants = [text + closer for closer in _CLOSERS]
        before, _, last_line = text.rpartition("\n")
        if "|" in last_line:  # the line may become a table header
            variants.append(before)
        width = self._width or shutil.get_terminal_size().columns
        num_settled = len(rows) - 1  # the last row grows
        for variant in variants:
            blocks = split_blocks(variant, self._first)
            first = self._renderer.rows(blocks[0], variant, width) if blocks else []
            agreeing = takewhile(
                lambda pair: pair[0] == pair[1],
                zip(rows, first[self._num_printed :], strict=False),
            )
            num_settled = min(num_settled, sum(1 for _ in agreeing))
        return num_settled

    def _rows(self, block: Block, columns: int) -> list[Row]:
        width = self._width or columns
        if block.is_in_place and self._num_printed:
            # A line so long that its first rows are printed turned out to be a table header.
            return self._renderer.written(block, self._source, width)
        return self._renderer.rows(block, self._source, width)

    def _with_space_before(self, rows: list[Row], block: Block) -> list[Row]:
        """`rows` after the empty row between two blocks, if they are the first of the second."""
        begins_block = rows and not self._num_printed and not block.follows_item
        space = [Row("", 0)] if begins_block and self._has_printed else []
        self._has_printed = self._has_printed or bool(rows)
        return space + rows

    def _replace_live(self, final: list[Row], live: list[Row], columns: int) -> None:
        """Erase the live rows, then print the final rows and the new live ones after them."""
        if not final and live == self._live:
            return
        height = sum(row.height(columns) for row in self._live)
        erase = ""
        if height:
            erase = "\r" + (f"\x1b[{height - 1}A" if height > 1 else "") + "\x1b[J"
        printed = "".join(row.ansi + "\n" for row in final)
        self._write(erase + printed + "\n".join(row.ansi for row in live))
        self._live = live
