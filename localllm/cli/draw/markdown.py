"""Render markdown as terminal rows, block by block.

markdown-it parses and rich draws. Some things differ for the sake of growing text and terminals:
HTML is shown, not dropped; a line of dashes under a paragraph is a rule, not a heading, so that no
later line changes how an earlier one looks; links show their address; code has no frame, so that
it can be copied; formulas in LaTeX's brackets stay as they are.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import ClassVar

from markdown_it import MarkdownIt
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token as Parsed
from pygments.lexers import get_lexer_by_name
from pygments.token import Comment, Generic, Keyword, Name, Number, Operator, String, Token
from pygments.util import ClassNotFound
from rich import box
from rich.cells import cell_len
from rich.color import ColorSystem
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock as RichCodeBlock
from rich.markdown import Heading as RichHeading
from rich.markdown import HorizontalRule as RichRule
from rich.markdown import ListElement as RichList
from rich.markdown import Markdown
from rich.markdown import TableElement as RichTable
from rich.rule import Rule
from rich.segment import Segment
from rich.style import Style
from rich.syntax import ANSISyntaxTheme, Syntax
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

# Those of the terminal's own colours that are readable on both black and white: no yellow, no
# bright ones, no blue.
CODE_THEME = ANSISyntaxTheme(
    {
        Token: Style(),
        Comment: Style(dim=True, italic=True),
        Keyword: Style(color="magenta", bold=True),
        Operator.Word: Style(color="magenta", bold=True),
        String: Style(color="green"),
        Number: Style(color="red"),
        Name.Function: Style(bold=True),
        Name.Class: Style(bold=True),
        Name.Tag: Style(color="magenta"),
        Generic.Deleted: Style(color="red"),
        Generic.Inserted: Style(color="green"),
        Generic.Heading: Style(bold=True),
    }
)
_THEME = Theme(
    {
        "markdown.code": "magenta",
        "markdown.code_block": "none",
        "markdown.item.bullet": "bold",
        "markdown.item.number": "bold",
        "markdown.block_quote": "italic",
        "markdown.hr": "dim",
        "markdown.link": "underline",
        "markdown.link_url": "underline",
        "markdown.table.border": "dim",
        "markdown.table.header": "bold",
    }
)
# A table column or a deeply nested list with less room for its text is shown as it was written.
MIN_COLUMN_CELLS = 4
MAX_INDENT_CELLS = 5  # per level: the list marker, and what a quotation adds

_PARSER = (
    MarkdownIt("commonmark", {"html": False})
    .enable(["table", "strikethrough"])
    .disable(["lheading", "reference", "image", "autolink", "html_block", "html_inline"])
)
_FORMULAS = {"\\(": "\\)", "\\[": "\\]"}


def _formula(state: StateInline, silent: bool) -> bool:
    """A parser rule: text in LaTeX's brackets is kept verbatim."""
    closing = _FORMULAS.get(state.src[state.pos : state.pos + 2])
    end = -1 if closing is None else state.src.find(closing, state.pos + 2)
    if end < 0:
        return False
    if not silent:
        # Not through `pending`, which loses blanks at the end of a line.
        state.push("text", "", 0).content = state.src[state.pos : end + 2]
    state.pos = end + 2
    return True


_PARSER.inline.ruler.before("escape", "formula", _formula)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of output: its text with colour codes, and its width in cells."""

    ansi: str
    num_cells: int

    def height(self, width: int) -> int:
        """How many rows it fills on a terminal `width` cells wide."""
        return max(1, -(-self.num_cells // width))


@dataclass(frozen=True, slots=True)
class Block:
    """A top-level element of the text, or one item of a top-level list, from `first_line` on.

    `number`: of an item in an ordered list; `follows_item`: whether another item comes right
    before it.
    """

    tokens: Sequence[Parsed]
    first_line: int
    number: int | None = None
    follows_item: bool = False

    @property
    def is_code(self) -> bool:
        """Whether it is a block of code, fenced or indented."""
        return self.tokens[0].type in ("fence", "code_block")

    @property
    def is_in_place(self) -> bool:
        """Whether it is a table, whose columns depend on every row."""
        return self.tokens[0].type == "table_open"


def split_blocks(source: str, after: Block | None = None) -> list[Block]:
    """The top-level elements of a markdown text, in order; each list item is a block of its own.

    `after`: the block that `source` now begins with, since it was cut before it.
    """
    elements: list[list[Parsed]] = []
    for token in _PARSER.parse(source):
        if token.level == 0 and token.nesting >= 0:
            elements.append([])
        elements[-1].append(token)
    blocks: list[Block] = []
    for tokens in elements:
        if tokens[0].type in ("bullet_list_open", "ordered_list_open"):
            blocks += _split_items(tokens, after if not blocks else None)
        else:
            blocks.append(Block(tokens, tokens[0].map[0] if tokens[0].map else 0))
    return blocks


def _split_items(tokens: Sequence[Parsed], after: Block | None) -> list[Block]:
    """Each item of a list as a list of its own, with the numbering continued."""
    opening, closing = tokens[0], tokens[-1]
    is_ordered = opening.type == "ordered_list_open"
    number = int(opening.attrs.get("start", 1)) if is_ordered else None
    follows_item = False
    if after is not None and (after.number is not None) == is_ordered:
        number, follows_item = after.number, after.follows_item
    blocks = []
    items: list[list[Parsed]] = []
    for token in tokens[1:-1]:
        if token.type == "list_item_open" and token.level == 1:
            items.append([])
        items[-1].append(token)
    for item in items:
        attrs = {} if number is None else {"start": number}
        own = [opening.copy(attrs=attrs), *item, closing]
        first_line = item[0].map[0] if item[0].map else 0
        blocks.append(Block(own, first_line, number, follows_item))
        number, follows_item = None if number is None else number + 1, True
    return blocks


class MarkdownRenderer:
    """Turns blocks into rows, with or without colours. Bold and the like are always used; without
    colours, inline code keeps its backticks.
    """

    def __init__(self, has_colour: bool) -> None:
        self._has_colour = has_colour
        self._consoles: dict[int, Console] = {}  # by width, of which a terminal has few

    def document(self, source: str, width: int) -> list[Row]:
        """Rows of a whole text: its blocks, with an empty row between them except between items."""
        rows: list[Row] = []
        for block in split_blocks(source):
            rows += [Row("", 0)] if rows and not block.follows_item else []
            rows += self.rows(block, source, width)
        return rows

    def rows(self, block: Block, source: str, width: int) -> list[Row]:
        """Rows of one block of `source`, wrapped at `width`; lines of code are not wrapped."""
        console = self._console(width)
        if block.is_code:
            return self._code_rows(block.tokens[0], console)
        depth = max(token.level for token in block.tokens) // 2
        is_too_deep = depth * MAX_INDENT_CELLS + MIN_COLUMN_CELLS > width
        if is_too_deep or (
            block.is_in_place and _num_columns(block.tokens) * MIN_COLUMN_CELLS > width
        ):
            return self.written(block, source, width)
        options = console.options.update(width=width)
        element = _BlockMarkdown(
            block.tokens if self._has_colour else _with_backticks(block.tokens)
        )
        rows = [
            self._segments_row(line) for line in console.render_lines(element, options, pad=False)
        ]
        # rich puts empty rows around some elements; here the caller adds the space between blocks.
        shown = [i for i, row in enumerate(rows) if row.num_cells]
        return rows[shown[0] : shown[-1] + 1] if shown else []

    def written(self, block: Block, source: str, width: int) -> list[Row]:
        """Rows of a block as it was written, wrapped at `width`."""
        first, last = block.tokens[0].map or [0, 0]
        text = Text("\n".join(source.split("\n")[first:last]))
        console = self._console(width)
        return [self._row(line, console) for line in text.wrap(console, width)]

    def _code_rows(self, token: Parsed, console: Console) -> list[Row]:
        lines = _highlight(token.content, token.info).split("\n", allow_blank=True)
        return [self._row(line, console) for line in lines] or [Row("", 0)]

    def _row(self, text: Text, console: Console) -> Row:
        text.expand_tabs(4)
        return self._segments_row(list(text.render(console, end="")))

    def _segments_row(self, segments: Sequence[Segment]) -> Row:
        segments = list(Segment.simplify(_without_trailing_blanks(segments)))
        ansi = "".join(self._ansi(segment) for segment in segments)
        return Row(ansi, sum(cell_len(segment.text) for segment in segments))

    def _ansi(self, segment: Segment) -> str:
        if not segment.style:
            return segment.text
        style = segment.style if self._has_colour else segment.style.without_color
        return style.render(segment.text, color_system=ColorSystem.STANDARD)

    def _console(self, width: int) -> Console:
        if width not in self._consoles:
            self._consoles[width] = self._new_console(width)
        return self._consoles[width]

    def _new_console(self, width: int) -> Console:
        return Console(
            file=io.StringIO(),
            width=width,
            height=1000,
            force_terminal=True,
            no_color=not self._has_colour,
            color_system="standard",
            legacy_windows=False,
            highlight=False,
            emoji=False,
            markup=False,
            theme=_THEME,
        )


def _with_backticks(tokens: Sequence[Parsed]) -> list[Parsed]:
    """`tokens` with inline code in its backticks, for output where no colour marks it."""

    def shown(token: Parsed) -> Parsed:
        if token.type == "code_inline":
            return token.copy(content=f"{token.markup}{token.content}{token.markup}")
        return token

    return [
        token.copy(children=[shown(child) for child in token.children]) if token.children else token
        for token in tokens
    ]


def _without_trailing_blanks(segments: Sequence[Segment]) -> list[Segment]:
    """`segments` without blanks at the end, which are invisible and get in the way of copying."""
    kept = [segment for segment in segments if not segment.control]
    while kept and not kept[-1].text.strip(" "):
        kept.pop()
    if kept:
        kept[-1] = Segment(kept[-1].text.rstrip(" "), kept[-1].style)
    return kept


def _highlight(code: str, info: str) -> Text:
    """`code` highlighted in the language that the fence names, without its last newline."""
    words = info.split()
    try:
        lexer = get_lexer_by_name(words[0] if words else "text", stripnl=False, ensurenl=False)
    except ClassNotFound:
        return Text(code.removesuffix("\n"))
    return Syntax("", lexer, theme=CODE_THEME).highlight(code.removesuffix("\n"))


def _num_columns(tokens: Sequence[Parsed]) -> int:
    rows = (
        list(group) for is_cell, group in groupby(tokens, lambda t: t.type != "tr_close") if is_cell
    )
    return max(sum(token.type in ("th_open", "td_open") for token in row) for row in rows)


class _CodeInList(RichCodeBlock):
    """Code inside a list or a quotation: wrapped, since it is indented like the rest."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = _highlight(str(self.text), self.lexer_name)
        text.overflow, text.no_wrap = "fold", False
        yield text


class _Heading(RichHeading):
    """A left-aligned heading, whatever its level."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = self.text.copy()
        text.justify = "left"
        yield text


class _Rule(RichRule):
    """A horizontal line across the terminal."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Rule(style=console.get_style("markdown.hr", default="none"), characters="─")


class _List(RichList):
    """A list whose markers are each as wide as needed, so that no later item moves them."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        is_bulleted = self.list_type == "bullet_list_open"
        for number, item in enumerate(self.items, self.list_start or 0):
            mark = " • " if is_bulleted else f" {number}. "
            style = console.get_style(f"markdown.item.{'bullet' if is_bulleted else 'number'}")
            inner = options.update(width=max(1, options.max_width - len(mark)))
            lines = console.render_lines(item.elements, inner, style=item.style, pad=False)
            for i, line in enumerate(lines):
                yield Segment(" " * len(mark) if i else mark, style)
                yield from line
                yield Segment.line()


class _Table(RichTable):
    """A table whose cells wrap and are never truncated."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        table = Table(box=box.SIMPLE, pad_edge=False, style="markdown.table.border")
        if self.header is not None and self.header.row is not None:
            for cell in self.header.row.cells:
                heading = cell.content.copy()
                heading.stylize("markdown.table.header")
                table.add_column(heading, justify=cell.justify, overflow="fold")
        for row in self.body.rows if self.body is not None else ():
            table.add_row(*(cell.content for cell in row.cells))
        yield table


class _BlockMarkdown(Markdown):
    """rich's Markdown for tokens that are already parsed."""

    elements: ClassVar = {
        **Markdown.elements,
        "fence": _CodeInList,
        "code_block": _CodeInList,
        "heading_open": _Heading,
        "hr": _Rule,
        "bullet_list_open": _List,
        "ordered_list_open": _List,
        "table_open": _Table,
    }

    def __init__(self, tokens: Sequence[Parsed]) -> None:
        super().__init__("", hyperlinks=False)
        self.parsed = list(tokens)
