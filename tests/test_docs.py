"""Links, paths and commands of the documentation hold, and the commands that can be run, run."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from localllm.cli.main import app
from localllm.hub.catalog import load_catalog

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "kernels/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCE = re.compile(r"^([ \t]*)(`{3,})([a-z]*)\n(.*?)^\1\2[ \t]*$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
_SUBSTITUTION = re.compile(r"\$\(([^()]*)\)")
# Words that stand for a value.
_PLACEHOLDER = re.compile(r"[A-Z][A-Z_]*")
_VALUES = {"N": "1", "URL": "http://127.0.0.1:8000"}
# What a page tells its reader to write.
_TO_BE_WRITTEN = ("hello.py", "test_hello.py")


@dataclass(frozen=True)
class Command:
    """A command of a page; `is_piped`: something else writes its stdin."""

    words: tuple[str, ...]
    is_piped: bool = False

    def __str__(self) -> str:
        return shlex.join(self.words)


def without_code(text: str) -> str:
    """A page's prose: neither fenced blocks nor code spans."""
    return re.sub(r"`[^`\n]*`", "", _FENCE.sub("", text))


def code_spans(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", _FENCE.sub("", text))


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """The names that GitHub gives to the headings of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#{1,6} +(.+?) *$", _FENCE.sub("", page.read_text()), re.MULTILINE):
        shown = _LINK.sub(lambda link: link[0].partition("]")[0].lstrip("!["), heading)
        name = re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-")
        found.append(f"{name}-{found.count(name)}" if name in found else name)
    return frozenset(found)


def broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in _LINK.findall(without_code(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors_of(there)):
            broken.append(target)
    return broken


def lines_of(text: str) -> Iterator[str]:
    """The lines of the ```sh blocks of a page."""
    for indent, _, language, block in _FENCE.findall(text):
        if language == "sh":
            for line in re.sub(r"\\\n", " ", block).splitlines():
                yield line.removeprefix(indent)


def commands_of_line(line: str) -> Iterator[Command]:
    """Its commands, without redirections and variables before them."""
    for inner in _SUBSTITUTION.findall(line):
        yield from commands_of_line(inner)
    lexer = shlex.shlex(_SUBSTITUTION.sub("value", line), posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    is_piped = is_target = False
    for token in [*lexer, ";"]:
        if is_target:
            is_target = False
        elif token in (">", ">>", "<"):
            is_target = True
        elif set(token) <= set("();|&"):
            if words:
                yield Command(tuple(words), is_piped)
            words, is_piped = [], token == "|"
        elif words or not (token == "time" or re.match(r"[A-Z_]+=", token)):
            words.append(_VALUES.get(token, "value") if _PLACEHOLDER.fullmatch(token) else token)


def all_commands() -> list[Command]:
    """Of all pages, each once."""
    lines = (line for page in PAGES for line in lines_of(page.read_text()))
    return list(dict.fromkeys(each for line in lines for each in commands_of_line(line)))


def own_commands() -> list[Command]:
    return [each for each in all_commands() if each.words[0] == "localllm"]


def parse(arguments: tuple[str, ...], *, is_whole: bool = True) -> None:
    """Have the command line read its arguments, and run nothing; not `is_whole`: arguments may be
    missing. Raises: typer's usage errors.
    """
    command: Any = typer.main.get_command(app)
    rest, context = list(arguments), None
    while True:
        name = "localllm" if context is None else context.info_name
        for parameter in command.params:
            parameter.callback = None  # which would act: --version, --install-completion
            parameter.required &= is_whole
        try:
            context = command.make_context(name, rest, parent=context)
        except typer.Exit:  # of --help
            return
        rest = [*getattr(context, "_protected_args", []), *context.args]
        if not hasattr(command, "commands") or not rest:
            return
        name, command, rest = command.resolve_command(context, rest)
        context.info_name = name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    assert broken_links(page, page.read_text()) == []


def test_a_broken_link_is_found() -> None:
    text = "[a](docs/none.md) [b](docs/README.md#none) [c](docs/README.md#use-it) `[d](x)`"
    assert broken_links(ROOT / "README.md", text) == ["docs/none.md", "docs/README.md#none"]


def test_the_index_names_every_page() -> None:
    index = ROOT / "docs" / "README.md"
    named = {(index.parent / each).resolve() for each in _LINK.findall(index.read_text())}
    pages = {page for page in PAGES if page.name != "reference.md"}
    assert pages - {index} <= named


def test_the_pages_are_short_enough_to_be_read() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.name != "flags.md"]
    num_words = {str(page.relative_to(ROOT)): len(page.read_text().split()) for page in pages}
    longest = sorted(num_words, key=lambda page: -num_words[page])[:3]
    assert sum(num_words.values()) <= 28_000, f"say things once; the longest pages: {longest}"


def pages_of_rooms() -> list[tuple[str, str]]:
    """Each room of the table in architecture.md, with each link to its page or section."""
    table = (ROOT / "docs" / "architecture.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \|[^|]*\|([^|]*)\|$", table, re.MULTILINE)
    return [(room, target) for room, links in rows for target in _LINK.findall(links)]


def folder_of(room: str) -> Path:
    return ROOT / ("kernels" if room == "localllm_kernels" else "localllm") / room


def first_lines(target: str) -> list[str]:
    """The ten lines below the heading that a link from architecture.md leads to."""
    path, _, anchor = target.partition("#")
    text = _FENCE.sub("", (ROOT / "docs" / path).read_text())
    for _, title, below in re.findall(r"^(#+) +(.+)\n+((?:(?!#).*\n?)*)", text, re.MULTILINE):
        if anchor in ("", re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")):
            return below.splitlines()[:10]
    return []


def what_an_opening_lacks(room: str, lines: list[str]) -> list[str]:
    """Of what a room is for, what it may not know, and a file of it to start at."""
    said = dict(re.findall(r"- \*\*([\w ]+):\*\*((?:.|\n  )+)", "\n".join([*lines, ""])))
    lacking = [
        each for each in ("For", "May not know", "Start at") if not said.get(each, "").strip()
    ]
    folder = folder_of(room)
    files = [folder.with_suffix(".py"), *folder.rglob("*.*")]
    for name in code_spans(said.get("Start at", ""))[:1]:
        if any(file.exists() and f"/{file}".endswith(f"/{name}") for file in files):
            return lacking
    return [*lacking, "a file of the room"]


def test_the_table_of_rooms_has_every_room() -> None:
    folders = {path.parent.name for path in (ROOT / "localllm").glob("*/__init__.py")}
    rooms = {room for room, _ in pages_of_rooms()}
    assert rooms == {*folders, "errors", "localllm_kernels"}


@pytest.mark.parametrize(("room", "target"), pages_of_rooms())
def test_the_page_of_a_room_begins_with_what_a_newcomer_needs(room: str, target: str) -> None:
    assert what_an_opening_lacks(room, first_lines(target)) == []


def test_an_opening_that_lacks_something_is_found() -> None:
    opening = [
        "- **For:** chats.",
        "- **May not know:** sockets.",
        "- **Start at:** `store.py`, which",
        "",
    ]
    assert what_an_opening_lacks("chat", opening) == []
    assert what_an_opening_lacks("text", opening) == ["a file of the room"]
    assert what_an_opening_lacks("chat", opening[1:]) == ["For"]
    assert what_an_opening_lacks("chat", ["", *opening[:1]])[:2] == ["May not know", "Start at"]


@pytest.mark.parametrize("command", own_commands(), ids=str)
def test_the_command_line_understands(command: Command) -> None:
    parse(command.words[1:])


@pytest.mark.parametrize(
    "line",
    [
        "localllm chat --no-such-flag",
        "localllm nothing",
        "localllm rm",
        "ls && localllm plan --vram",
        "echo $(localllm ls --bogus)",
        "cat a | localllm bench -r many > out",
    ],
)
def test_a_command_that_is_wrong_is_found(line: str) -> None:
    [command] = [each for each in commands_of_line(line) if each.words[0] == "localllm"]
    with pytest.raises(typer.BadParameter.__bases__[0]):
        parse(command.words[1:])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_within_a_text_have_names_and_flags_that_there_are(page: Path) -> None:
    for span in code_spans(page.read_text()):
        is_pattern = re.search(r"[\[\]|…]|\.\.\.", span)
        if span.startswith("localllm ") and not is_pattern and "hello" not in span:
            [*_, command] = commands_of_line(span)
            if command.words[0] == "localllm":
                parse(command.words[1:], is_whole=False)


@cache
def known_files() -> tuple[str, ...]:
    folders = [ROOT / name for name in ("localllm", "kernels", "tests", "tools")]
    files = [path for folder in folders for path in folder.rglob("*.*")]
    return tuple(f"/{path.relative_to(ROOT)}" for path in files)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_source_file_that_is_named_is_there(page: Path) -> None:
    spans = [word for span in code_spans(page.read_text()) for word in span.split()]
    named = {word for word in spans if re.fullmatch(r"[\w./-]+\.(py|c|h)", word)}
    missing = {
        name
        for name in named
        if not name.endswith(_TO_BE_WRITTEN) and "NAME" not in name
        if not any(path.endswith(f"/{name}") for path in known_files())
    }
    assert missing == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_of_python_and_pytest_is_there(page: Path) -> None:
    text = page.read_text()
    spans = [span for span in code_spans(text) if re.search(r"\b(python|pytest) ", span)]
    missing = []
    for line in [*lines_of(text), *spans]:
        for command in commands_of_line(line):
            if command.words[0] in ("python", "python3", "pytest"):
                missing += [path for path in paths_of(command.words) if not is_there(path)]
    assert missing == []


def paths_of(words: tuple[str, ...]) -> list[str]:
    """What a `python` or `pytest` reads: scripts, modules, tests."""
    if words[0] != "pytest":
        return [f"{words[2]}.py"] if words[1] == "-m" else words[1:2] if "/" in words[1] else []
    return [word.partition("::")[0] for word in words[1:] if word.startswith("tests/")]


def is_there(path: str) -> bool:
    if path.startswith("localllm_kernels."):
        path = "kernels/" + path.removesuffix(".py").replace(".", "/") + ".py"
    is_library = path in ("venv.py", "pip.py")
    is_written = path.endswith(_TO_BE_WRITTEN)
    return is_library or is_written or (ROOT / path).exists()


# Those that a test can run: they need neither a network nor a GPU, and end by themselves.
_RUN = (
    *("bench", "cache", "chat", "config", "doctor", "eval", "limits", "ls", "plan", "ps"),
    *("quantize", "sessions", "show", "stop"),
)
_NEEDS_MORE = {"--url", "--compare", "--kernels", "--gpu", "--remote", "--calib-dataset"}
# A last flag wins over an earlier one.
_SMALL = {
    "bench": "-p 16 -n 4 -r 1",
    "chat": "-n 24",
    "quantize": "--calib-samples 2 --calib-seqlen 32",
}


def runnable() -> list[Command]:
    return [each for each in map(as_run_here, own_commands()) if each is not None]


def as_run_here(command: Command) -> Command | None:
    """With the built-in model and small limits; None for what needs more, or asks on a terminal."""
    name, words = (command.words[1:2] or ("",))[0], list(command.words[1:])
    can_run = name in _RUN and not _NEEDS_MORE & set(words[: 1 if name == "plan" else None])
    if not can_run or name.startswith("-"):
        return None
    if name != "plan":  # which reads the catalogue alone
        words = [
            "pocket" if word in load_catalog() or "@" in word or word == "value" else word
            for word in words
        ]
    if "--random-weights" in words:
        words.remove("--random-weights")
        if "--weights" in words:
            del words[words.index("--weights") : words.index("--weights") + 2]
    has_prompt = any(" " in word for word in words) or command.is_piped
    if name == "chat" and not has_prompt:
        return None
    return Command((*words, *_SMALL.get(name, "").split()), command.is_piped)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A working directory with the files that the pages name."""
    place = tmp_path / "work"
    place.mkdir()
    story = "The old lighthouse stood on a rock, and the keeper lit its lamp each night.\n"
    for name in ("book.txt", "report.md", "notes.txt"):
        (place / name).write_text(story * 200 if name == "book.txt" else story)
    (place / "src").mkdir()
    (place / "src" / "lamp.py").write_text("OIL = 12\n")
    name_alone = {"type": "object", "properties": {"name": {"type": "string"}}}
    (place / "person.json").write_text(json.dumps(name_alone))
    for name in ("small", "my-checkpoint"):
        shutil.copytree(ROOT / "localllm" / "pocket", place / name)
    return place


def run_here(words: tuple[str, ...], folder: Path, stdin: bytes = b"") -> Any:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    return subprocess.run(
        [sys.executable, "-m", "localllm", *words],
        cwd=folder,
        input=stdin,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=600,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("command", runnable(), ids=str)
def test_the_command_runs(command: Command, folder: Path) -> None:
    words = command.words
    if words[0] == "sessions" or "--continue" in words:
        run_here(("chat", "--session", "fox", "Tell me about a fox.", "-n", "4"), folder)
    if words[0] == "config":
        run_here(("config", "set", "temp", "0.7"), folder)
    if words[0] == "quantize":
        shutil.rmtree(folder / "small")
    if words[0] == "quantize" and "--max-kl" in words:  # a few windows say little of quality
        at = words.index("--max-kl") + 1
        words = (*words[:at], "10", *words[at + 1 :])
    done = run_here(words, folder, b"A fox." if command.is_piped else b"")
    assert done.returncode == 0, done.stderr.decode()[-2000:]


def test_every_picture_is_shown_on_a_page_and_every_scene_has_one() -> None:
    folder = ROOT / "docs" / "pictures"
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    shown = {
        name for page in pages for name in re.findall(r"pictures/([\w-]+\.\w+)", page.read_text())
    }
    assert {path.name for path in folder.iterdir()} == shown
    scenes = re.findall(
        r"^def (\w+)\(home: Path\)", (ROOT / "tools" / "screenshots.py").read_text(), re.M
    )
    assert {f"{scene}.svg" for scene in scenes} == {name for name in shown if name.endswith("svg")}
