"""Several files, folders and patterns before a prompt, as people type them."""

import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from window import Open

from localllm.cli.chat.words import split_files
from localllm.cli.input import text_files
from localllm.cli.input.text_files import find_files, read_files
from localllm.cli.input.user_input import gather_prompt
from localllm.errors import ContextLengthError, ExitCode, RequestError

Run = Callable[..., Any]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder as of a small program, which is the current one."""
    root = tmp_path / "project"
    for name, data in {
        "src/a.py": b"print(1)\n",
        "src/b.py": b"print(2)\n",
        "src/deep/c.py": b"print(3)\n",
        "src/notes.txt": b"Notes.\n",
        "src/logo.png": bytes(range(256)),
        "src/.hidden": b"secret",
        "src/__pycache__/a.pyc": b"x",
        "src/large.txt": b"x" * (1 << 21),
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    monkeypatch.chdir(root)
    return root


def test_what_a_shell_makes_of_a_pattern_is_read(localllm: Run, project: Path) -> None:
    """`-f src/*.py "explain"`: the shell leaves one file behind -f, and the others as words."""
    names = ["src/a.py", "src/b.py"]
    flags = ("--raw", "--greedy", "-n", "1", "--json")
    typed = localllm("chat", "-f", *names, "explain this", *flags)
    assert typed.code == 0, typed.err
    text = "src/a.py:\n\nprint(1)\n\nsrc/b.py:\n\nprint(2)\n\nexplain this"
    whole = localllm("chat", "-p", text, *flags)
    assert json.loads(typed.out)["usage"] == json.loads(whole.out)["usage"]
    with_model = localllm("chat", "pocket", "-f", *names, "explain this", *flags)
    assert json.loads(with_model.out)["usage"] == json.loads(whole.out)["usage"]


@pytest.mark.parametrize("name", ["src", "src/", "./src"])
def test_a_folder_stands_for_its_texts_and_what_is_left_out_is_told(
    localllm: Run, project: Path, name: str
) -> None:
    outcome = localllm("chat", "-f", name, "explain", "-n", "2")
    assert outcome.code == 0, outcome.err
    assert "4 files" in outcome.err
    assert "left out, binary: 1 (logo.png)" in outcome.err
    assert "left out, hidden or generated: 2 (" in outcome.err
    assert "left out, over 1 MiB: 1 (large.txt)" in outcome.err
    text = read_files([name])
    assert [line for line in text.splitlines() if line.endswith(":")] == [
        f"{Path(name)}/{inside}:" for inside in ("a.py", "b.py", "notes.txt", "deep/c.py")
    ]
    assert "secret" not in text


@pytest.mark.parametrize(
    ("pattern", "count"), [("src/*.py", 2), ("src/**/*.py", 3), ("*/[ab].py", 2)]
)
def test_a_pattern_in_quotes_is_read_as_a_shell_would(
    localllm: Run, project: Path, pattern: str, count: int
) -> None:
    assert len(find_files(pattern).texts) == count
    outcome = localllm("chat", "-f", pattern, "explain", "-n", "2")
    assert outcome.code == 0, outcome.err
    assert f"{count} files" in outcome.err


@pytest.mark.parametrize("name", ["*.rs", "src/.hidden/*", "nothing"])
def test_what_names_no_file_is_refused(localllm: Run, project: Path, name: str) -> None:
    outcome = localllm("chat", "-f", name, "explain")
    assert outcome.code == ExitCode.USAGE
    assert name in outcome.err


def test_a_folder_without_a_text_is_refused_with_the_reason(project: Path) -> None:
    (project / "pictures").mkdir()
    (project / "pictures" / "x.bin").write_bytes(bytes(range(256)))
    with pytest.raises(RequestError) as caught:
        find_files("pictures")
    assert "left out, binary: 1" in caught.value.where


def test_a_model_s_folder_behind_files_is_the_model(
    project: Path, make_checkpoint: Callable[..., Path]
) -> None:
    folder = str(make_checkpoint())
    words = [folder, "src/b.py", "explain"]
    assert split_files(["src/a.py"], words) == (["src/a.py", "src/b.py"], [folder, "explain"])
    assert split_files([], ["src/a.py", "explain"]) == ([], ["src/a.py", "explain"])
    assert split_files(["-"], ["explain"]) == ([], ["explain"])


@pytest.mark.parametrize("word", ["", " ", "~", ".", "*", "**", "?", "~/*"])
def test_a_word_that_names_no_files_sends_none(project: Path, word: str) -> None:
    """As `chat -f FILE "$P"` whose variable is empty: the current folder is not sent."""
    assert split_files(["src/a.py"], [word]) == (["src/a.py"], [word])
    assert split_files(["src/a.py"], ["src/*.py"]) == (["src/a.py", "src/*.py"], [])


def test_an_empty_word_behind_a_file_is_an_empty_prompt(localllm: Run, project: Path) -> None:
    flags = ("--raw", "-n", "1", "--json")
    alone = localllm("chat", "-f", "src/a.py", "", *flags)
    assert json.loads(alone.out)["usage"]["prompt_tokens"] < 20
    assert "files" not in alone.err


@pytest.mark.parametrize(
    ("piped", "files", "prompt", "joined"),
    [
        (b"a\r\nb\r\n", [], None, "a\r\nb\r\n"),
        (b"\n\n a\n\n", [], None, "\n\n a\n\n"),
        (b" \n", [], None, " \n"),
        (b"\xef\xbb\xbfa", [], None, "\ufeffa"),
        (b"", ["crlf.txt"], None, "x\r\ny\n"),
        (b"a\n", ["crlf.txt"], "q\n", "a\n\nx\r\ny\n\nq\n"),
        (b"a", [], "q", "a\n\nq"),
    ],
)
def test_a_raw_prompt_is_sent_as_it_is(
    project: Path,
    monkeypatch: pytest.MonkeyPatch,
    piped: bytes,
    files: list[str],
    prompt: str | None,
    joined: str,
) -> None:
    (project / "crlf.txt").write_bytes(b"x\r\ny\n")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(piped)))
    assert gather_prompt(prompt, read_files(files, is_raw=True), is_raw=True) == joined


@pytest.mark.parametrize("words", [("-f", "", "hi"), ("-f", " ", "hi"), ("", "hi"), ("-m", "")])
def test_an_empty_path_or_model_is_refused(
    localllm: Run, project: Path, words: tuple[str, ...]
) -> None:
    outcome = localllm("chat", *words, "-n", "2")
    assert outcome.code == ExitCode.USAGE
    assert "is empty" in outcome.err


def test_links_that_lead_in_circles_end(project: Path) -> None:
    os.symlink("..", project / "src" / "up")
    os.symlink("nowhere", project / "src" / "gone")
    found = find_files("src")
    assert len(found.texts) == 4
    assert found.left_out["not a file"] == ["gone"]


def test_a_folder_of_more_text_than_any_context_holds_is_refused(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "MAX_INPUT_BYTES", 20)
    with pytest.raises(ContextLengthError, match="more than any context holds"):
        find_files("src")


def test_a_prompt_without_quotes_is_told_to_have_some(localllm: Run) -> None:
    outcome = localllm("chat", "why", "is", "the", "sky", "blue")
    assert outcome.code == ExitCode.USAGE
    assert "localllm chat 'why is the sky blue'" in outcome.err


def test_files_of_a_conversation(open_window: Open, project: Path) -> None:
    window = open_window("It prints.", rows=40)
    window.say(f"/file {project}/src")
    window.wait_for(r"4 files, (.|\n)*binary: 1(.|\n)*sent\s+with\s+the\s+next\s+message")
    window.say("/file off")
    window.say(f"/file {project}/src/*.py what does it print?")
    window.wait_for(r"2\s+files")
    window.wait_for("It prints")


@pytest.mark.parametrize(
    "question", ["what is it?", "why?", "What does *args mean here", "Is [this] so?", "2 * 3 = ..."]
)
def test_a_question_beside_files_is_no_pattern(project: Path, question: str) -> None:
    assert split_files(["src/a.py"], [question]) == (["src/a.py"], [question])
    assert split_files(["src/a.py"], ["src/*.py", question])[1] == [question]
    assert split_files(["src/a.py"], ["no/*.py", question])[1] == [question]


def test_a_file_among_several_that_is_not_there_is_named(project: Path) -> None:
    with pytest.raises(RequestError, match=r"no file 'nope\.py'"):
        split_files(["src/a.py"], ["nope.py", "Summarise this."])
