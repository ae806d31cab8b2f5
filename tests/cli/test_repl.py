"""The conversation on a real pseudo-terminal, read back from a terminal emulator's screen."""

import json
import os
import re
import signal
import sys
import termios
import time
from pathlib import Path

import pexpect
import pytest
from fork_server import PATHS, ROOT
from window import Open, Window

from localllm.cli.draw.markdown import MarkdownRenderer

ANSWER = """\
# Title

A paragraph with *emphasis*, `code`, 日本語 and enough words to be wrapped on most terminals.

```python
def f(x):
    return x + 1
```

1. one
2. two

| a | b |
|---|--:|
| x | 1 |
"""
THOUGHTS = "<think>\nLet me see.\n</think>\n\n"


def exported(window: Window, folder: Path) -> list[dict[str, str]]:
    """The messages of the conversation, by way of `/export`."""
    path = folder / "chat.json"
    window.say(f"/export {path}")
    window.wait_for(r"wrote \d+ messages")
    window.settle()
    messages: list[dict[str, str]] = json.loads(path.read_text())["messages"]
    return messages


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_an_answer_looks_as_if_it_had_been_there_at_once(open_window: Open, columns: int) -> None:
    window = open_window(ANSWER, columns=columns, rows=60)
    window.say("hi")
    window.wait_for("context")
    window.settle()
    expected = [
        re.sub(r"\x1b\[[0-9;]*m", "", row.ansi)
        for row in MarkdownRenderer(True).document(ANSWER, columns)
    ]
    first = window.lines.index(expected[0])
    assert window.lines[first : first + len(expected)] == expected


def test_thoughts_come_dim_before_the_answer(open_window: Open) -> None:
    window = open_window(THOUGHTS + "The answer.")
    window.say("hi")
    lines = window.wait_for("context").split("\n")
    at = lines.index("Let me see.")
    assert lines[at + 1 : at + 3] == ["", "The answer."]
    assert "think>" not in window.text


def test_ctrl_c_stops_an_answer_and_continue_goes_on(open_window: Open, tmp_path: Path) -> None:
    words = " ".join(f"word{i}" for i in range(100))
    window = open_window(words, step_ms=3, rows=80)
    window.say("hi")
    window.wait_for("word9 ")
    started = time.monotonic()
    window.send("\x03")
    window.wait_for("interrupted; /continue resumes the answer")
    assert time.monotonic() - started < 2
    window.say("/continue")
    window.wait_for("word99")
    window.wait_for("(?s)context.*context")
    assert exported(window, tmp_path)[1]["content"] == words


def test_ctrl_c_while_the_prompt_is_read_keeps_the_conversation(open_window: Open) -> None:
    window = open_window("First.", "Second.", step_ms=20, prefill_steps=100)
    window.say("hi")
    time.sleep(0.5)
    window.send("\x03")
    window.wait_for("interrupted")
    window.say("/stats")
    window.wait_for("ended by +Ctrl-C")


def test_keys_typed_while_an_answer_streams_wait_for_the_next_prompt(open_window: Open) -> None:
    window = open_window("word " * 50, "Second.", step_ms=5)
    window.say("hi")
    window.wait_for("word word")
    window.send("next question")
    window.wait_for("context")
    text = window.wait_for("> next question")
    assert text.count("next question") == 1
    window.send("\r")
    window.wait_for(r"Second\.")


def test_a_paste_of_500_lines_is_one_message_and_sends_nothing(
    open_window: Open, tmp_path: Path
) -> None:
    window = open_window("Read.")
    pasted = "\n".join(f"line {i}" for i in range(500))
    window.send(f"\x1b[200~{pasted}\x1b[201~")
    window.wait_for("line 499")
    window.settle()
    assert "Read." not in window.text
    window.send("\r")
    window.wait_for(r"Read\.")
    assert exported(window, tmp_path)[0] == {"role": "user", "content": pasted}


def test_alt_enter_and_a_backslash_add_a_line(open_window: Open, tmp_path: Path) -> None:
    window = open_window("Yes.")
    window.send("one\x1b\rtwo\\\rthree 日本\r")
    window.wait_for(r"Yes\.")
    assert exported(window, tmp_path)[0]["content"] == "one\ntwo\nthree 日本"


def test_in_multi_mode_enter_adds_a_line_and_alt_enter_sends(open_window: Open) -> None:
    window = open_window("Sent.")
    window.say("/multi")
    window.wait_for("Alt-Enter sends")
    window.send("one\rtwo\r")
    window.settle()
    assert "Sent." not in window.text
    window.send("\x1b\r")
    window.wait_for(r"Sent\.")
    window.send("/multi\x1b\r")
    window.wait_for("Enter sends\n")


def test_every_command_is_listed_and_an_unknown_one_names_help(open_window: Open) -> None:
    window = open_window("x", rows=50)
    window.say("/help")
    text = window.wait_for("begins with /")
    names = "help model system set stats think file multi regen continue undo clear export exit"
    for name in names.split(" "):
        assert f"/{name}" in text
    window.say("/nonsense now")
    window.wait_for("unknown command '/nonsense'")
    window.wait_for("/help lists all")
    window.say("//etc is a folder")
    window.wait_for("context")


def test_commands_change_what_is_asked(open_window: Open, tmp_path: Path) -> None:
    window = open_window("One.", "Two.", "Three.", rows=60)
    window.say("/system Be brief.")
    window.wait_for("system prompt is set")
    window.say("/set temp 0.25")
    window.wait_for("temp is 0.25")
    window.say("/set temp hot")
    window.wait_for("must be a number")
    window.say("/set max-tokens 3")
    window.wait_for("max-tokens is 3")
    window.say("hello")
    window.wait_for("cut at the token limit")
    window.say("/set max-tokens default")
    window.say("/continue")
    window.wait_for(r"\nOne\.\n")
    window.say("/regen")
    window.wait_for(r"Three\.")
    window.say("/undo")
    window.wait_for("removed: hello")
    window.say("/think off")
    window.wait_for("thinking: off, shown")
    window.say("/think hide")
    window.wait_for("thinking: off, hidden")
    window.say("/stats off")
    window.wait_for("statistics under each answer are off")
    window.say("/model")
    window.wait_for("scripted, context 32,768")
    window.say("/model nosuchmodel")
    window.wait_for("unknown model 'nosuchmodel'")
    window.say("/clear")
    window.wait_for("a new conversation")
    window.say("/exit")
    assert window.exit_code() == 0


def test_another_model_goes_on_with_the_conversation(open_window: Open) -> None:
    window = open_window("One.")
    window.say("hello")
    window.wait_for(r"One\.")
    window.say("/model pocket")
    window.wait_for("pocket answers from now on")
    window.say("/set max-tokens 5")
    window.say("hello again")
    window.wait_for(r"context \d+/2,048")


def test_a_file_goes_with_the_next_message(open_window: Open, tmp_path: Path) -> None:
    window = open_window("Read.", rows=60, columns=200)
    notes = tmp_path / "my notes.txt"
    notes.write_text("Buy milk.\n")
    window.say(f"/file {notes}")
    window.wait_for("will be sent with the next message")
    window.say("What is on it?")
    window.wait_for("context")
    assert exported(window, tmp_path)[0]["content"] == "Buy milk.\n\nWhat is on it?"
    window.say(f"/export {tmp_path / 'chat.json'}")
    window.wait_for("already exists")
    window.say(f"/export {tmp_path / 'chat.md'}")
    window.wait_for("chat.md")
    window.settle()
    assert "## user\n\nBuy milk." in (tmp_path / "chat.md").read_text()
    window.say("/file /no/such/file")
    window.wait_for("is not a file")


def test_tab_completes_commands_and_paths(open_window: Open, tmp_path: Path) -> None:
    (tmp_path / "only-one.txt").write_text("x")
    window = open_window("x", columns=200)
    window.send("/exp\t")
    window.wait_for("> /export")
    window.send(f" {tmp_path}/only\t")
    window.wait_for(r"only-one\.txt")


def test_history_survives_a_restart(open_window: Open) -> None:
    first = open_window("x")
    first.say("remember me")
    first.wait_for("context")
    first.send("\x04")
    assert first.exit_code() == 0
    second = open_window("x")
    second.send("\x1b[A")
    second.wait_for("> remember me")


def test_two_ctrl_c_at_an_empty_prompt_leave_with_130(open_window: Open) -> None:
    window = open_window("x")
    window.send("not sent\x03")
    window.settle()
    assert "Ctrl-C again" not in window.text
    window.send("\x03")
    window.wait_for("Ctrl-C again")
    window.send("\x03")
    assert window.exit_code() == 130


def test_ctrl_o_folds_thinking_and_shows_it_again(open_window: Open) -> None:
    window = open_window(THOUGHTS + "The answer.")
    window.send("\x0f")
    window.wait_for("thinking is folded")
    window.say("hi")
    text = window.wait_for(r"The answer\.")
    assert "Let me see." not in text
    assert re.search(r"thought for \d\.\d s, \d+ tokens; Ctrl-O shows it", text)
    window.wait_for("context")
    window.settle()
    window.send("\x0f")
    window.wait_for("(?s)Let me see\\..*thinking is shown")


def test_escape_sequences_of_a_model_are_made_visible(open_window: Open) -> None:
    window = open_window("a\x1b[2Jb \x1b]0;title\x07 c \x9b31m d")
    window.say("hi")
    text = window.wait_for("context")
    assert "a␛[2Jb" in text
    assert "hi" in text
    assert window.screen.title == ""


@pytest.mark.parametrize("columns", [1, 5, 19])
def test_a_terminal_of_hardly_any_width_shows_all_the_text(open_window: Open, columns: int) -> None:
    window = open_window("One **two** three.", columns=80, rows=60)
    window.resize(columns, 300)
    window.say("hi")
    end = time.monotonic() + 20
    while "cached" not in window.text.replace("\n", "") and time.monotonic() < end:
        window.pump()
    assert "One**two**three." in re.sub(r"\s", "", window.text)


def test_a_resize_in_an_answer_loses_no_word(open_window: Open) -> None:
    words = " ".join(f"word{i}" for i in range(100))
    window = open_window(words, columns=60, rows=100, step_ms=3)
    window.say("hi")
    window.wait_for("word30 ")
    window.resize(33, 100)
    window.wait_for("cached")
    shown = re.sub(r"\s", "", window.text)
    assert all(f"word{i}" in shown for i in range(40, 100))


def test_a_dumb_terminal_gets_plain_text(tmp_path: Path, make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    answer = tmp_path / "answer.md"
    answer.write_text("One **two** three.")
    process = pexpect.spawn(
        sys.executable,
        [str(ROOT / "tests/scripted.py"), str(make_checkpoint()), str(answer)],
        env={
            **os.environ,
            "PYTHONPATH": PATHS,
            "TERM": "dumb",
            "XDG_DATA_HOME": str(tmp_path),
        },
        timeout=30,
        encoding="utf-8",
    )
    process.expect("> ")
    process.send("hi\r")
    process.expect("context")
    assert "One **two** three." in process.before
    assert "\x1b[" not in process.before.partition("hi")[2]
    process.close(force=True)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_the_terminal_is_itself_again_however_it_ends(
    open_window: Open, signum: signal.Signals
) -> None:
    window = open_window("word " * 3000, step_ms=5)
    descriptor = window.descriptor
    window.say("hi")
    window.wait_for("word word")
    assert not termios.tcgetattr(descriptor)[3] & termios.ECHO
    window.process.send_signal(signum)
    if signum == signal.SIGINT:
        window.wait_for("interrupted")
        window.send("\x04")
    for _ in range(100):
        window.pump()
        if window.process.poll() is not None:
            break
    assert termios.tcgetattr(descriptor)[3] & termios.ECHO


def test_the_real_model_answers(tmp_path: Path) -> None:
    window = Window(["-m", "localllm", "chat", "--seed", "1", "-n", "20"], 120, 40, tmp_path)
    window.wait_for(r"\n>")
    window.say("hello")
    window.wait_for(r"prompt \d+ \(0 cached\) .*answer [\d,]+ tok/s .*context \d+/2,048")
    window.send("\x04")
    assert window.exit_code() == 0


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (50, 24), (40, 30)])
def test_help_fits_on_the_screen_and_breaks_no_word(
    open_window: Open, columns: int, rows: int
) -> None:
    window = open_window("x", columns=columns, rows=rows)
    window.say("/help")
    window.wait_for("/help keys lists the keys")
    window.settle()
    screen = window.text
    for name in ("/help", "/model", "/regen", "/export", "/exit"):
        assert name in screen
    assert re.search(r"/compact +summarise the older", screen)
    window.say("/help keys")
    window.wait_for("search the history")
