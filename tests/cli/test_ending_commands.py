"""Every command ends within two seconds of Ctrl-C or SIGTERM, in whatever it is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What is ended, and after how long: while it starts, while it loads, while it computes. None: once
# the first piece of its answer is there, since all of it takes half a second.
COMPUTING: list[tuple[tuple[str, ...], float | None]] = [
    (("chat", "pocket", "-n", "1500", "--raw", "Once"), None),
    (("quantize", "pocket", "small"), 4.0),
    (("serve", "pocket", "--port", "0"), 4.0),
]
# The others by both signals are in test_quantize.py and tests/server/test_server_faults.py too. A
# forked process imports nothing, so it computes sooner.
FORKED_S = 1.5
QUICK = [
    (*COMPUTING[0], signal.SIGINT),
    (*COMPUTING[0], signal.SIGTERM),
    (COMPUTING[1][0], FORKED_S, signal.SIGTERM),
    (COMPUTING[2][0], FORKED_S, signal.SIGINT),
]
SLOW = [
    *[(command, after_s) for command, _ in COMPUTING for after_s in (0.5, 1.5)],
    *[
        (command, after_s)
        for command in (
            ("bench", "pocket"),
            ("eval", "pocket", "book.txt"),
            ("doctor",),
            ("plan", "pocket"),
        )
        for after_s in (0.5, 1.5, 4.0)
    ],
]


@pytest.mark.parametrize(
    ("command", "after_s", "number"),
    [
        *QUICK,
        *(
            pytest.param(*each, number, marks=pytest.mark.slow)
            for each in [*COMPUTING, *SLOW]
            for number in (signal.SIGINT, signal.SIGTERM)
        ),
    ],
)
def test_a_command_ends_within_two_seconds(
    command: tuple[str, ...], after_s: float | None, number: int, tmp_path: Path
) -> None:
    (tmp_path / "book.txt").write_text("It was a dark and stormy night. " * 2000)
    process = subprocess.Popen(
        [sys.executable, "-m", "localllm", *command],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if after_s is None:
        assert process.stdout is not None
        assert process.stdout.read(1)
    else:
        time.sleep(after_s)
    was_over = process.poll() is not None
    process.send_signal(number)
    began_s = time.monotonic()
    _, errors = process.communicate(timeout=30)
    taken_s = time.monotonic() - began_s
    assert taken_s < 3.5  # two seconds, and what a busy machine adds
    if not was_over:
        assert process.returncode in (128 + number, -number)
    assert "Traceback" not in errors
