"""A published model as a user meets it: in a terminal, and in memory."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from fork_server import ROOT
from window import Window


@pytest.fixture
def window(smollm: Path, tmp_path: Path) -> Iterator[Window]:
    """A conversation that has begun."""
    # Without drafts, since a small model repeats itself, and would be done before Ctrl-C comes.
    flags = ["--ctx", "2048", "--greedy", "--spec", "off"]
    window = Window(["-m", "localllm", "chat", str(smollm), *flags], 80, 50, tmp_path / "data")
    window.wait_for(r"^> ?$|\n> ?(\n|$)", seconds=180)
    yield window
    window.close()


def test_a_conversation_is_answered_stopped_and_continued(window: Window) -> None:
    window.say("What is the capital of France?")
    assert "Paris" in window.wait_for("context", seconds=60)
    window.settle()
    window.say("/clear")
    window.settle()
    window.say("Tell me a long story about a lighthouse.")
    window.wait_for(r"about a lighthouse\.\s+\w+ \w+ \w+", seconds=60)
    window.send("\x03")
    window.wait_for("interrupted; /continue resumes the answer", seconds=20)
    window.say("/set max_tokens 20")
    window.settle()
    window.say("/continue")
    window.wait_for("/continue goes on|context", seconds=60)
    window.settle()
    window.send("\x04")
    assert window.exit_code() == 0


RUN_AND_MEASURE = """
import os, subprocess, sys
process = subprocess.Popen(sys.argv[1:])
_, status, usage = os.wait4(process.pid, 0)
print(f"resident: {usage.ru_maxrss}", flush=True)
sys.exit(os.waitstatus_to_exitcode(status))
"""


def test_one_answer_takes_the_memory_of_its_weights_and_little_more(qwen: Path) -> None:
    command = [sys.executable, "-m", "localllm", "chat", str(qwen), "Say hi.", "-n", "1"]
    # By a small process between: the kernel counts what a process was before it ran a program.
    between = [sys.executable, "-c", RUN_AND_MEASURE, *command, "--ctx", "2048"]
    done = subprocess.run(between, cwd=ROOT, capture_output=True, text=True, check=True)
    said, _, measured = done.stdout.rpartition("resident: ")
    assert re.fullmatch(r"\S+\n", said)
    resident = int(measured) << 10
    weights = sum(file.stat().st_size for file in qwen.glob("*.safetensors"))
    # Weights as stored and packed, a cache of 2,048 tokens, torch and the tokenizer.
    assert resident < 2 * weights + 1e9
