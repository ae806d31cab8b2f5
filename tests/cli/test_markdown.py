"""Markdown that grows on a terminal: at the end it looks as if it had been there at once."""

import os
import random
import re
import time
from collections.abc import Callable

import pyte
import pytest
from in_turns import in_turns
from seeds import seeds

from localllm.cli.draw import markdown_stream
from localllm.cli.draw.markdown import MarkdownRenderer, Row
from localllm.cli.draw.markdown_stream import MAX_LIVE_ROWS, MarkdownPrinter

TEXT = (
    "the quick *brown* **fox jumps** over `the lazy` dog [link](http://a.b) snake_case 2 * 3 a|b "
    "~~x~~ ** unclosed ` tick [ br é 👍 日本語 <div> &amp; \\* 1. - x"
)
WORDS = TEXT.split(" ")
CODE = (
    "def f(x):",
    "    return 'abc' + x  # comment",
    "",
    "x = " + "1234567890" * 9,
    '"""a',
    'b"""',
)


def prose(rng: random.Random, low: int, high: int) -> str:
    return " ".join(rng.choice(WORDS) for _ in range(rng.randrange(low, high)))


def random_block(rng: random.Random) -> str:
    kind = rng.randrange(8)
    count = range(rng.randrange(1, 13))
    if kind < 2:
        return prose(rng, 3, 120)
    if kind == 2:
        return "#" * rng.randrange(1, 4) + " " + prose(rng, 2, 8)
    if kind == 3:
        return "\n".join(f"{i + 1}. {prose(rng, 2, 20)}" for i in count)
    if kind == 4:
        return "\n".join(f"{'  ' * rng.randrange(2)}- {prose(rng, 2, 12)}" for _ in count)
    if kind == 5:
        return "```python\n" + "\n".join(rng.choice(CODE) for _ in count) + "\n```"
    if kind == 6:
        rows = "\n".join(f"| {prose(rng, 1, 4)} | {prose(rng, 1, 2)} | z |" for _ in count)
        return "| a | b | c |\n|---|--:|---|\n" + rows
    return f"> {prose(rng, 3, 60)}\n" + rng.choice(["---", "", "text"])


def random_document(rng: random.Random) -> str:
    blocks = [random_block(rng) for _ in range(rng.randrange(1, 7))]
    return ("\n\n" if rng.random() < 0.8 else "\n").join(blocks)


class Terminal:
    """A screen tall enough that nothing scrolls away, and what was written to it."""

    def __init__(self, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.columns = columns
        self.rows = 24
        self.screen = pyte.Screen(columns, 3000)
        self._stream = pyte.Stream(self.screen)
        self.writes: list[str] = []
        monkeypatch.setattr(
            markdown_stream.shutil,
            "get_terminal_size",
            lambda *fallback, **named: os.terminal_size((self.columns, self.rows)),
        )

    def write(self, text: str) -> None:
        self.writes.append(text)
        self._stream.feed(text.replace("\n", "\r\n"))

    @property
    def lines(self) -> list[str]:
        """Down to the last row with text; to draw those below takes longer than all else."""
        self.screen.lines, whole = max(self.screen.buffer, default=0) + 1, self.screen.lines
        lines = [line.rstrip() for line in self.screen.display]
        self.screen.lines = whole
        return "\n".join(lines).rstrip("\n").split("\n")

    @property
    def colours(self) -> list[list[tuple[str, str, bool]]]:
        cells = self.screen.buffer
        return [
            [(cells[y][x].data, cells[y][x].fg, cells[y][x].bold) for x in range(self.columns)]
            for y in range(self.screen.cursor.y)
        ]


def uneven_clock(rng: random.Random) -> Callable[[], float]:
    now = 0.0

    def clock() -> float:
        nonlocal now
        now += rng.choice([0.001, 0.08])
        return now

    return clock


@pytest.mark.parametrize("seed", seeds(5, 40))
def test_the_last_screen_is_that_of_the_whole_text_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    columns = rng.choice([20, 33, 40, 80, 200])
    document = random_document(rng)
    grown = Terminal(columns, monkeypatch)
    printer = MarkdownPrinter(grown.write, MarkdownRenderer(True), uneven_clock(rng))
    at = 0
    while at < len(document):
        length = rng.randrange(1, 6)
        printer.push(document[at : at + length])
        at += length
    printer.finish()
    whole = Terminal(columns, monkeypatch)
    for row in MarkdownRenderer(True).document(document, columns):
        whole.write(row.ansi + "\n")
    assert grown.lines == whole.lines
    assert (grown.screen.cursor.x, grown.screen.cursor.y) == (0, whole.screen.cursor.y)
    assert grown.colours == whole.colours


@pytest.mark.parametrize(
    ("said", "more", "first"),
    [
        ("A:\n\n```py\ndef f(x):\n    if x:\n        ", "y()\n    z()\n```\n\nB.\n", "def f(x):"),
        ("```c\nint a;\n", "\n    int b;\n```\n", "int a;"),
        ("One.\n\nTwo is", " **bold** and\nlonger.\n\nThree.\n", "Two is bold"),
        ("1. a\n2. b\n3. c", " and\n   d\n4. e\n", "3. c and d"),
        ("- a\n  - b", "c\n  - d\n- e\n", "a"),
        ("|a|b|\n|-|-|\n|1|", "2|\n|3|4|\n", "a"),
    ],
)  # fmt: skip
def test_a_block_that_was_stopped_in_goes_on_as_that_block(
    said: str, more: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rows of the last block are printed again, and what follows looks as in the whole text."""
    grown = Terminal(40, monkeypatch)
    printer = MarkdownPrinter(grown.write, MarkdownRenderer(True))
    printer.continue_behind(said)
    for char in more:
        printer.push(char)
    printer.finish()
    whole = Terminal(40, monkeypatch)
    for row in MarkdownRenderer(True).document(said + more, 40):
        whole.write(row.ansi + "\n")
    shown = [line for line in grown.lines if line.strip()]
    expected = [line for line in whole.lines if line.strip()]
    assert shown == expected[len(expected) - len(shown) :]
    assert first in shown[0]


@pytest.mark.parametrize("seed", seeds(2, 12))
def test_only_the_last_rows_are_ever_drawn_again(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    terminal = Terminal(rng.choice([20, 80]), monkeypatch)
    terminal.rows = rng.choice([3, 24])
    printer = MarkdownPrinter(terminal.write, MarkdownRenderer(False), uneven_clock(rng))
    for char in random_document(rng):
        printer.push(char)
    printer.finish()
    ups = [int(n) for text in terminal.writes for n in re.findall(r"\x1b\[(\d+)A", text)]
    assert max(ups, default=0) < min(MAX_LIVE_ROWS, terminal.rows - 1)


def words_of(text: str) -> list[str]:
    return re.findall(r"\w+", text)


@pytest.mark.parametrize("columns", [20, 27, 80, 200])
@pytest.mark.parametrize("seed", range(6))
def test_no_word_of_the_text_is_dropped(seed: int, columns: int) -> None:
    document = random_document(random.Random(seed)).replace("&amp;", "&")
    rows = MarkdownRenderer(False).document(document, columns)
    shown = "".join(re.sub(r"[\s│─▌•]", "", row.ansi) for row in rows)
    for word in words_of(re.sub(r"```python", "", document)):
        assert word in shown, word


@pytest.mark.parametrize(
    "text",
    [
        "<b>bold?</b> and <script>alert(1)</script>",
        "![a picture](http://a.b/c.png)",
        "[1]: http://reference.example",
        "<https://auto.example>",
        "Title\n---\nText",
        "| a |\n|---|\n| " + "w" * 70 + " |",
        "```\n" + "x" * 300 + "\n```",
        "```nosuchlanguage\n\n\n  kept\n\n```",
        "1. Run this:\n\n   ```sh\n   pip install " + "alpha beta gamma " * 9 + "end\n   ```",
        "    indented code that is much longer than the terminal is wide, and must not be cut",
        "> " * 8 + "hello world",
        "- > " * 6 + "hello world end",
        "- " + "\n- ".join("item" + "s" * i for i in range(20)),
    ],
)
def test_what_a_browser_would_hide_is_shown(text: str) -> None:
    rows = MarkdownRenderer(False).document(text, 40)
    shown = "".join(re.sub(r"\x1b\[[0-9;]*m", "", row.ansi) for row in rows)
    for word in words_of(re.sub(r"```\w*|&amp;", "", text)):
        assert word in shown.replace(" ", "").replace("\n", ""), word


def test_code_is_printed_line_by_line_and_left_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(40, monkeypatch)
    printer = MarkdownPrinter(
        terminal.write, MarkdownRenderer(False), uneven_clock(random.Random(1))
    )
    long = "value = " + "+".join(["term"] * 20)
    for line in ("```python", *[f"line_{i} = {i}" for i in range(9)], long, "```"):
        for char in line + "\n":
            printer.push(char)
    shown = "".join(terminal.writes)
    assert long in shown
    printer.finish()
    assert "line_0 = 0\n" in shown


def test_a_long_line_that_becomes_the_head_of_a_table_is_shown_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal = Terminal(40, monkeypatch)
    printer = MarkdownPrinter(
        terminal.write, MarkdownRenderer(False), uneven_clock(random.Random(2))
    )
    head = " ".join(f"word{i}" for i in range(60))
    document = head + " | Name\n|---|---|\n| v1 | v2 |\n"
    for at in range(0, len(document), 3):
        printer.push(document[at : at + 3])
    printer.finish()
    shown = words_of(" ".join(terminal.lines))
    assert [word for word in shown if word.startswith("word")] == head.split()
    assert {"Name", "v1", "v2"} <= set(shown)


def test_control_characters_never_reach_a_row() -> None:
    # They are made visible before; a row's own escapes are colours only.
    rows = MarkdownRenderer(True).document("**a** `b` [c](http://d)", 40)
    for row in rows:
        assert set(re.findall(r"\x1b\[[\d;]*(.)", row.ansi)) <= {"m"}
        assert "\x1b]" not in row.ansi


def test_a_row_knows_its_height() -> None:
    assert [Row("x", n).height(20) for n in (0, 1, 20, 21, 41)] == [1, 1, 1, 2, 3]


@pytest.mark.parametrize(("after", "before"), in_turns([20, 120], [80, 30]))
def test_a_resized_terminal_loses_no_word(
    before: int, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(before + after)
    document = "\n\n".join(
        " ".join(f"w{i}x{rng.randrange(10**6)}" for i in range(60)) for _ in range(3)
    )
    terminal = Terminal(before, monkeypatch)
    printer = MarkdownPrinter(terminal.write, MarkdownRenderer(False), uneven_clock(rng))
    half = len(document) // 2
    for char in document[:half]:
        printer.push(char)
    terminal.columns = after
    terminal.screen.resize(lines=3000, columns=after)
    for char in document[half:]:
        printer.push(char)
    printer.finish()
    written = re.sub(r"\x1b\[[\d;]*\w|\s", "", "".join(terminal.writes))
    for word in words_of(document):
        assert word in written, word


LONG = {
    "many blocks": lambda rng: "\n\n".join(random_block(rng) for _ in range(200)),
    "one paragraph": lambda rng: "plain words of *prose* in one line " * 900,
    "one list": lambda rng: "\n".join(f"- item {i} with **some** words" for i in range(1100)),
    "one block of code": lambda rng: "```python\n" + "x = f(y)  # note\n" * 2000 + "```",
}


@pytest.mark.parametrize(
    "name",
    [
        "many blocks",
        pytest.param("one paragraph", marks=pytest.mark.slow),
        pytest.param("one list", marks=pytest.mark.slow),
        pytest.param("one block of code", marks=pytest.mark.slow),
    ],
)
def test_a_token_takes_under_3_ms_at_30_kb(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = LONG[name](random.Random(7))[:30_000]
    terminal = Terminal(80, monkeypatch)
    pieces = [document[i : i + 4] for i in range(0, len(document), 4)]
    num_pushed = 0

    def clock() -> float:  # 50 tokens a second, and the time that drawing takes
        return 0.02 * num_pushed + time.process_time()

    printer = MarkdownPrinter(terminal.writes.append, MarkdownRenderer(True), clock)
    started = time.process_time()
    for piece in pieces:
        num_pushed += 1
        printer.push(piece)
    printer.finish()
    assert len(document) == 30_000
    assert len(terminal.writes) > 50
    assert (time.process_time() - started) / len(pieces) < 0.003


@pytest.mark.parametrize(
    "formula",
    [r"\( \frac{1}{2} \)", r"\[ a_1 * b_2 * c = \{x\} \]", r"\(\alpha_1, \beta_2\)"],
)
@pytest.mark.parametrize("has_colour", [True, False])
def test_formulas_in_latex_s_brackets_stay_as_they_are(formula: str, has_colour: bool) -> None:
    [row] = MarkdownRenderer(has_colour).document(f"Half is {formula}, and *so* on.", 80)
    assert formula in row.ansi
    assert "*so*" not in row.ansi


def test_without_colours_bold_and_backticks_are_left() -> None:
    text = "# Head\n\nWrite `from localllm import LLM` **now**:\n\n```python\nprint(1)  # one\n```"
    rows = MarkdownRenderer(False).document(text, 80)
    shown = "\n".join(row.ansi for row in rows)
    assert "`from localllm import LLM`" in shown
    assert "\x1b[1mnow\x1b[0m" in shown
    assert "Head" in shown
    colours = re.findall(r"\x1b\[([0-9;]*)m", shown)
    assert not any(30 <= int(part) <= 107 for codes in colours for part in codes.split(";") if part)


def test_colours_are_readable_on_any_ground() -> None:
    """Yellow, white and the bright ones vanish on white; blue does on black."""
    text = (
        "1. one\n\n- item `code` [link](http://x)\n\n> quoted\n\n---\n\n| a |\n|---|\n| b |\n\n"
        '```python\n@f\nclass A:\n    def g(self): return "s" + 1 is None  # why\n```'
    )
    shown = "\n".join(row.ansi for row in MarkdownRenderer(True).document(text, 80))
    codes = {
        int(part)
        for found in re.findall(r"\x1b\[([0-9;]*)m", shown)
        for part in found.split(";")
        if part
    }
    assert codes <= {0, 1, 2, 3, 4, 31, 32, 35}
