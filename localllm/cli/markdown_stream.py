"""A growing markdown text on a terminal: what is finished is printed once and never touched.

Only the last rows, at most six, are drawn again as the text grows, at most 15 times a second. A
row leaves that live region when no text that may follow can change it; the last block of the text
is rendered with every ending that could (an emphasis that closes, a link), and where the
renderings agree the row is final. So the screen at the end is that of the whole text rendered at
once.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from itertools import takewhile

from localllm.cli.markdown import Block, MarkdownRenderer, Row, split_blocks

MAX_LIVE_ROWS = 6
MIN_DRAW_INTERVAL_S = 1 / 15
# Drawing takes at most this share of the time, however long a block gets.
MAX_DRAW_SHARE = 0.1
# What could still turn text that is already there into something else: one more mark, or several
# after one another, each of which closes what was opened before the last.
_MARKS = ("*", "**", "***", "_", "__", "`", "``", "~~", "](x)", "\\)", "\\]")
_CLOSERS = (*_MARKS, *(f"x{mark}" * 6 for mark in _MARKS), "x*x**" * 4)


class MarkdownPrinter:
    """Prints pieces of a markdown text as they come.

    `write` gets the bytes for the terminal as text; `clock` counts seconds.
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
        self._source = ""  # from the first block that is not finished
        self._width = 0  # the unfinished block keeps the width that it began with
        self._num_printed = 0  # rows of the unfinished block that are final
        self._has_printed = False
        self._first: Block | None = None  # what the source was cut before
        self._live: list[Row] = []
        self._next_draw_s = 0.0

    def push(self, piece: str) -> None:
        """Add `piece`, and draw if it is time."""
        self._source += piece
        started = self._clock()
        if started >= self._next_draw_s:
            self._draw(is_last=False)
            ended = self._clock()
            pause = max(MIN_DRAW_INTERVAL_S, (ended - started) / MAX_DRAW_SHARE)
            self._next_draw_s = ended + pause

    def finish(self) -> None:
        """Print what is left; the cursor is at the start of a row then."""
        self._draw(is_last=True)

    def _draw(self, *, is_last: bool) -> None:
        size = shutil.get_terminal_size()
        blocks = split_blocks(self._source, self._first)
        final: list[Row] = []
        while blocks and (is_last or len(blocks) > 1):
            final += self._final_rows(blocks.pop(0), size.columns)
        live: list[Row] = []
        if blocks:
            # Blocks are counted from the lines of the old source; what is left begins at its own.
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
        """What is not yet printed of a block that is whole."""
        rows = self._rows(block, columns)[self._num_printed :]
        rows = self._with_space_before(rows, block)
        self._num_printed, self._width = 0, 0
        return rows

    def _unfinished_rows(
        self, block: Block, columns: int, lines: int
    ) -> tuple[list[Row], list[Row]]:
        """Rows of the last block that have become final, and those that are live."""
        limit = max(1, min(MAX_LIVE_ROWS, lines - 1))
        rows = self._rows(block, columns)[self._num_printed :]
        settled: list[Row] = []
        if sum(row.height(columns) for row in rows) > limit and not block.is_table:
            num_settled = self._num_settled(block, rows)
            while num_settled and sum(row.height(columns) for row in rows) > limit:
                settled.append(rows.pop(0))
                num_settled -= 1
        live: list[Row] = []
        for row in reversed(rows):  # more than fits only while nothing is final yet
            if sum(each.height(columns) for each in [*live, row]) > limit:
                break
            live.insert(0, row)
        if settled:
            settled_rows = self._with_space_before(settled, block)
            self._num_printed += len(settled)
            self._width = self._width or columns
            return settled_rows, live
        # The space before the block is live with it, as long as there is room.
        height = sum(row.height(columns) for row in live)
        begins = self._has_printed and not self._num_printed and not block.follows_item
        if begins and height < limit:
            live.insert(0, Row("", 0))
        return [], live

    def _num_settled(self, block: Block, rows: Sequence[Row]) -> int:
        """How many of the block's rows from `rows` on no following text can change."""
        if block.is_code:
            return len(rows) - 1
        text = self._source.rstrip("\n")
        variants = [text + closer for closer in _CLOSERS]
        before, _, last_line = text.rpartition("\n")
        if "|" in last_line:  # the line may become the head of a table
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
        if block.is_table and self._num_printed:
            # A line so long that its first rows are printed turns out to be the head of a table.
            return self._renderer.written(block, self._source, width)
        return self._renderer.rows(block, self._source, width)

    def _with_space_before(self, rows: list[Row], block: Block) -> list[Row]:
        """An empty row between two blocks, printed with the first row of the second."""
        begins_block = rows and not self._num_printed and not block.follows_item
        space = [Row("", 0)] if begins_block and self._has_printed else []
        self._has_printed = self._has_printed or bool(rows)
        return space + rows

    def _replace_live(self, final: list[Row], live: list[Row], columns: int) -> None:
        """Erase the live rows, print the final ones for good and the new live ones after them."""
        if not final and live == self._live:
            return
        height = sum(row.height(columns) for row in self._live)
        erase = ""
        if height:
            erase = "\r" + (f"\x1b[{height - 1}A" if height > 1 else "") + "\x1b[J"
        printed = "".join(row.ansi + "\n" for row in final)
        self._write(erase + printed + "\n".join(row.ansi for row in live))
        self._live = live
