"""The conversation on a real pseudo-terminal."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pexpect
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def terminal() -> Iterator["pexpect.spawn[str]"]:
    paths = f"{ROOT}:{ROOT / 'kernels'}"
    process = pexpect.spawn(
        sys.executable,
        ["-m", "localllm", "chat", "--seed", "1"],
        # The test's terminal does not answer a question for the cursor's place.
        env={**os.environ, "PYTHONPATH": paths, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"},
        encoding="utf-8",
        timeout=60,
        dimensions=(24, 80),
    )
    process.expect(">")
    yield process
    process.close(force=True)


def test_a_prompt_gets_an_answer_and_ctrl_d_leaves(terminal: "pexpect.spawn[str]") -> None:
    terminal.send("Once upon a time\r")
    terminal.expect(r"prompt tokens .* context \d+/2048")
    terminal.expect(">")
    terminal.sendeof()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


def test_ctrl_c_stops_an_answer_and_not_the_conversation(terminal: "pexpect.spawn[str]") -> None:
    terminal.send("The king\r")
    terminal.expect(r"[a-z]{3,} [a-z]+")
    terminal.sendintr()
    terminal.expect("interrupted")
    terminal.expect(">")
    terminal.send("/help\r")
    terminal.expect("forget the conversation")
    terminal.send("/exit\r")
    terminal.expect(pexpect.EOF)


def test_two_ctrl_c_at_an_empty_prompt_leave_with_130(terminal: "pexpect.spawn[str]") -> None:
    terminal.sendintr()
    terminal.expect("Ctrl-C again")
    terminal.expect(">")
    terminal.sendintr()
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 130
