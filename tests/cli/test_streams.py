"""Every command with each of its streams a terminal or not: what goes where."""

import json
import os
import pty
import subprocess
import sys
import threading
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest

from localllm.errors import ExitCode

ROOT = Path(__file__).parents[2]
# Every pair of two streams in every way; all three in every way are slow.
PAIRS = [(True, True, True), (True, False, False), (False, True, False), (False, False, True)]
STREAMS = [
    streams if streams in PAIRS else pytest.param(streams, marks=pytest.mark.slow)
    for streams in product([True, False], repeat=3)
]
# Arguments, the exit code, and whether something is expected on stdout.
COMMANDS: dict[str, tuple[list[str], int, bool]] = {
    "chat": (["chat", "What is the KV cache?", "-n", "6", "--greedy"], 0, True),
    "chat --json": (["chat", "What is the KV cache?", "-n", "4", "--json"], 0, True),
    "eval": (["eval", "pocket", "--text", "{text}"], 0, True),
    "quantize": (["quantize", "pocket", "{out}", "--dry-run"], 0, True),
    "bench": (["bench", "-p", "8", "-n", "4", "-r", "1"], 0, True),
    "pull": (["pull", "nobody/nothing"], ExitCode.NETWORK, False),
    "warm": (["warm", "pocket"], 0, False),
    "ls": (["ls"], 0, True),
    "show": (["show", "pocket"], 0, True),
    "rm": (["rm", "qwen3-8b", "--yes"], ExitCode.MODEL, False),
    "plan": (["plan", "qwen3-8b", "--gpu", "rtx-4060"], 0, True),
    "doctor": (["doctor"], 0, True),
    "sessions": (["sessions", "list"], 0, False),
    "config": (["config", "get"], 0, False),
    "cache": (["cache", "list"], 0, True),
    "help": (["--help"], 0, True),
    "wrong": (["chat", "--temp", "warm"], ExitCode.USAGE, False),
}
# Those that import torch. Each is run in one way, and `chat` in the opposite one too; slow are all.
LONG = ("bench", "chat", "chat --json", "doctor", "eval", "plan", "quantize", "warm")
QUICK = [name for name in COMMANDS if name not in LONG]


def letters(streams: tuple[bool, bool, bool]) -> str:
    return "".join("t" if is_terminal else "p" for is_terminal in streams)


@dataclass
class Ran:
    code: int
    out: str
    err: str


def run(arguments: list[str], on_terminal: tuple[bool, bool, bool]) -> Ran:
    """Run the command with stdin, stdout and stderr a terminal or not; a pipe as stdin is empty."""
    texts: list[bytes] = [b"", b""]
    readers, opened, given = [], [], []
    for number, is_terminal in enumerate(on_terminal):
        if number == 0 and not is_terminal:
            given.append(subprocess.DEVNULL)
            continue
        parent, child = pty.openpty() if is_terminal else os.pipe()
        opened.append((parent, child))
        given.append(child)
        if number:
            readers.append(threading.Thread(target=_read, args=(parent, texts, number - 1)))
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", *arguments],
        stdin=given[0],
        stdout=given[1],
        stderr=given[2],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "TERM": "xterm-256color",
            "HF_HUB_OFFLINE": "1",
        },
        start_new_session=True,
    )
    for _, child in opened:
        os.close(child)
    for reader in readers:
        reader.start()
    code = process.wait(timeout=120)
    for reader in readers:
        reader.join()
    for parent, _ in opened:
        os.close(parent)
    return Ran(code, *(text.decode().replace("\r\n", "\n") for text in texts))


def _read(descriptor: int, texts: list[bytes], place: int) -> None:
    while True:
        try:
            piece = os.read(descriptor, 65536)
        except OSError:  # a terminal whose other end is closed
            return
        if not piece:
            return
        texts[place] += piece


def check(name: str, streams: tuple[bool, bool, bool], tmp_path: Path) -> None:
    words, expected, has_output = COMMANDS[name]
    text = tmp_path / "text.txt"
    text.write_text("The cache keeps keys and values of all tokens. " * 8)
    places = {"text": str(text), "out": str(tmp_path / "out")}
    ran = run([word.format(**places) for word in words], streams)
    assert ran.code == expected, ran.err
    _, out_is_terminal, err_is_terminal = streams
    if not out_is_terminal:
        assert "\x1b" not in ran.out
        assert "\r" not in ran.out
    if not err_is_terminal:
        assert "\x1b" not in ran.err
    assert "Traceback" not in ran.out + ran.err
    assert bool(ran.out) == has_output
    if has_output:
        assert ran.out.endswith("\n")
    if expected:
        assert "error: " in ran.err
        assert "try: " in ran.err
    if name == "chat --json":
        assert json.loads(ran.out)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("streams", STREAMS, ids=letters)
@pytest.mark.parametrize("name", QUICK)
def test_streams(name: str, streams: tuple[bool, bool, bool], tmp_path: Path) -> None:
    check(name, streams, tmp_path)


ALWAYS = {*((name, (True, False, True)) for name in LONG), ("chat", (False, True, False))}


@pytest.mark.parametrize(
    ("name", "streams"),
    [
        pytest.param(*each, marks=[] if each in ALWAYS else pytest.mark.slow)
        for each in product(LONG, product([True, False], repeat=3))
    ],
    ids=lambda value: value if isinstance(value, str) else letters(value),
)
def test_streams_of_commands_that_take_long(
    name: str, streams: tuple[bool, bool, bool], tmp_path: Path
) -> None:
    check(name, streams, tmp_path)


@pytest.mark.parametrize("ways", [PAIRS[:2], pytest.param(PAIRS, marks=pytest.mark.slow)])
def test_the_answer_is_the_same_wherever_it_goes(ways: list[tuple[bool, bool, bool]]) -> None:
    arguments = ["chat", "What is the KV cache?", "-n", "12", "--greedy", "--render", "plain"]
    answers = {run(arguments, streams).out.strip() for streams in ways}
    assert len(answers) == 1
