"""The conversation on a real pseudo-terminal, read back from a terminal emulator's screen."""

import json
import os
import re
import signal
import sys
import termios
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pexpect
import pyte
import pytest

from localllm.cli.markdown import MarkdownRenderer

ROOT = Path(__file__).parents[2]
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
QWEN_LIKE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not "
    "enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


class Window:
    """A program in a terminal of a given size, and the screen that it has drawn."""

    def __init__(self, command: list[str], columns: int, rows: int, home: Path) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests"))),
            "TERM": "xterm-256color",
            "XDG_DATA_HOME": str(home),
            # The test's terminal does not answer a question for the cursor's place.
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "OMP_NUM_THREADS": "1",
        }
        for name in ("COLUMNS", "LINES"):  # pytest-xdist sets them; the terminal's size counts here
            environment.pop(name, None)
        self.screen = pyte.Screen(columns, rows)
        self._stream = pyte.ByteStream(self.screen)
        self.process = pexpect.spawn(
            sys.executable, command, env=environment, dimensions=(rows, columns), timeout=30
        )

    def pump(self, seconds: float = 0.05) -> None:
        """Let the program write for a while."""
        try:
            self._stream.feed(self.process.read_nonblocking(65536, timeout=seconds))
        except (pexpect.TIMEOUT, pexpect.EOF):
            return

    def settle(self) -> None:
        """Wait until nothing has been written for a while."""
        for _ in range(400):
            before = self.screen.dirty.copy()
            self.screen.dirty.clear()
            self.pump(0.1)
            if not self.screen.dirty and not before:
                return

    def wait_for(self, pattern: str, seconds: float = 30) -> str:
        """Wait until `pattern` is somewhere on the screen; returns the screen."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.pump()
            if re.search(pattern, self.text):
                return self.text
        raise AssertionError(f"{pattern!r} never came:\n{self.text}")

    def send(self, keys: str) -> None:
        self.process.send(keys)

    def say(self, text: str) -> None:
        self.send(text + "\r")

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        return "\n".join(self.lines)

    def resize(self, columns: int, rows: int) -> None:
        self.process.setwinsize(rows, columns)
        self.screen.resize(rows, columns)

    def exit_code(self) -> int:
        for _ in range(200):
            self.pump()
            if not self.process.isalive():
                break
        self.process.close(force=True)
        return self.process.exitstatus if self.process.exitstatus is not None else -1


Open = Callable[..., Window]


@pytest.fixture
def open_window(tmp_path: Path, make_checkpoint) -> Iterator[Open]:  # type: ignore[no-untyped-def]
    """Opens the conversation with a model that says what it is told to."""
    windows = []
    folder = make_checkpoint()
    (folder / "chat_template.jinja").write_text(QWEN_LIKE)

    def start(
        *answers: str, columns: int = 80, rows: int = 40, step_ms: float = 1, prefill_steps: int = 0
    ) -> Window:
        paths = []
        for i, answer in enumerate(answers):
            path = tmp_path / f"answer{i}.md"
            path.write_text(answer)
            paths.append(str(path))
        command = [
            str(ROOT / "tests/scripted.py"),
            str(folder),
            *paths,
            f"--step-ms={step_ms}",
            f"--prefill-steps={prefill_steps}",
        ]
        window = Window(command, columns, rows, tmp_path / "data")
        windows.append(window)
        window.wait_for(r"^> ?$|\n> ?(\n|$)")
        return window

    yield start
    for window in windows:
        window.process.close(force=True)


def exported(window: Window, folder: Path) -> list[dict[str, str]]:
    """The messages of the conversation, by way of `/export`."""
    path = folder / "chat.json"
    window.say(f"/export {path}")
    window.wait_for("messages are in")
    window.settle()
    messages: list[dict[str, str]] = json.loads(path.read_text())["messages"]
    return messages


@pytest.mark.parametrize("columns", [20, 40, 80, 200])
def test_an_answer_looks_as_if_it_had_been_there_at_once(open_window: Open, columns: int) -> None:
    window = open_window(ANSWER, columns=columns, rows=60)
    window.say("hi")
    window.wait_for("context")
    window.settle()
    expected = [row.ansi for row in MarkdownRenderer(False).document(ANSWER, columns)]
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
    words = " ".join(f"word{i}" for i in range(300))
    window = open_window(words, step_ms=3, rows=80)
    window.say("hi")
    window.wait_for("word9 ")
    started = time.monotonic()
    window.send("\x03")
    window.wait_for("interrupted; /continue goes on")
    assert time.monotonic() - started < 2
    window.say("/continue")
    window.wait_for("word299")
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
    window = open_window("word " * 100, "Second.", step_ms=5)
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
    window.wait_for("/help shows them")
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
    window.wait_for("cut at the limit")
    window.say("/set max-tokens default")
    window.say("/continue")
    window.wait_for(r"\n\.\n")
    window.say("/regen")
    window.wait_for(r"Three\.")
    window.say("/undo")
    window.wait_for("taken back: hello")
    window.say("/think off")
    window.wait_for("thinking: off, shown")
    window.say("/think hide")
    window.wait_for("thinking: off, hidden")
    window.say("/stats off")
    window.wait_for("line under an answer is off")
    window.say("/model")
    window.wait_for("scripted, context 32,768")
    window.say("/model nosuchmodel")
    window.wait_for("unknown model 'nosuchmodel'")
    window.say("/clear")
    window.wait_for("forgotten")
    window.say("/exit")
    assert window.exit_code() == 0


def test_another_model_goes_on_with_the_conversation(open_window: Open) -> None:
    window = open_window("One.")
    window.say("hello")
    window.wait_for(r"One\.")
    window.say("/model pocket")
    window.wait_for("pocket answers from here on")
    window.say("/set max-tokens 5")
    window.say("hello again")
    window.wait_for(r"context \d+/2048")


def test_a_file_goes_with_the_next_message(open_window: Open, tmp_path: Path) -> None:
    window = open_window("Read.", rows=60, columns=200)
    notes = tmp_path / "my notes.txt"
    notes.write_text("Buy milk.\n")
    window.say(f"/file {notes}")
    window.wait_for("go with the next message")
    window.say("What is on it?")
    window.wait_for("context")
    assert exported(window, tmp_path)[0]["content"] == "Buy milk.\n\nWhat is on it?"
    window.say(f"/export {tmp_path / 'chat.json'}")
    window.wait_for("is there already")
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


def test_ctrl_o_hides_thinking(open_window: Open) -> None:
    window = open_window(THOUGHTS + "The answer.")
    window.send("\x0f")
    window.wait_for("thinking is hidden")
    window.say("hi")
    window.wait_for(r"The answer\.")
    assert "Let me see." not in window.text


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
    words = " ".join(f"word{i}" for i in range(200))
    window = open_window(words, columns=60, rows=100, step_ms=3)
    window.say("hi")
    window.wait_for("word50 ")
    window.resize(33, 100)
    window.wait_for("cached")
    shown = re.sub(r"\s", "", window.text)
    assert all(f"word{i}" in shown for i in range(60, 200))


def test_a_dumb_terminal_gets_plain_text(tmp_path: Path, make_checkpoint) -> None:  # type: ignore[no-untyped-def]
    answer = tmp_path / "answer.md"
    answer.write_text("One **two** three.")
    process = pexpect.spawn(
        sys.executable,
        [str(ROOT / "tests/scripted.py"), str(make_checkpoint()), str(answer)],
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests"))),
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
    descriptor = window.process.child_fd
    window.say("hi")
    window.wait_for("word word")
    assert not termios.tcgetattr(descriptor)[3] & termios.ECHO
    window.process.kill(signum)
    if signum == signal.SIGINT:
        window.wait_for("interrupted")
        window.send("\x04")
    for _ in range(100):
        window.pump()
        if not window.process.isalive():
            break
    assert termios.tcgetattr(descriptor)[3] & termios.ECHO


def test_the_real_model_answers(tmp_path: Path) -> None:
    window = Window(["-m", "localllm", "chat", "--seed", "1", "-n", "20"], 100, 40, tmp_path)
    window.wait_for(r"\n>")
    window.say("hello")
    window.wait_for(r"prompt \d+ \(0 cached\) \d+ tok/s .*context \d+/2048")
    window.send("\x04")
    assert window.exit_code() == 0
