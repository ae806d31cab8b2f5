"""Faults of the machine and of the moment: no GPU, no room, a signal in the middle of something.

Where the others of the fault table are: names, gates, networks and damage in
tests/hub/test_download.py, files of a model in test_faults.py, pipes in test_chat.py and
test_streams.py, catalogues in test_config.py, sessions in tests/chat/test_store.py and
test_repl_turns.py, terminals in test_repl.py.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_hub import Fault, Hub, running_hub

from localllm.errors import ExitCode

ROOT = Path(__file__).parents[2]
Run = Callable[..., Any]
Make = Callable[..., Path]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_row_20_no_gpu_is_exit_code_6_and_stops_nothing_else(
    make_checkpoint: Make, localllm: Run, tmp_path: Path
) -> None:
    folder = str(make_checkpoint())
    outcome = localllm("chat", folder, "hi", "--device", "cuda")
    assert outcome.code == ExitCode.MEMORY
    assert "no usable GPU" in outcome.err
    assert f"torch {torch.__version__}" in outcome.err
    assert "--device cpu" in outcome.err
    for words in (
        ("--help",),
        ("sessions", "list"),
        ("ls",),
        ("plan", "qwen3-8b", "--gpu", "4090"),
        ("quantize", "pocket", str(tmp_path / "out"), "--dry-run"),
    ):
        assert localllm(*words).code == 0, words


def test_row_21_what_does_not_fit_is_told_before_loading(
    make_checkpoint: Make, localllm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint()
    monkeypatch.setattr("localllm.engine.loaded_decoder.free_bytes", lambda device: 1 << 20)
    monkeypatch.setattr("localllm.engine.loaded_decoder.load_model", pytest.fail)
    outcome = localllm("chat", str(folder), "hi")
    assert outcome.code == ExitCode.MEMORY
    for part in ("weights", "activations", "KV cache", "free", "--ctx"):
        assert part in outcome.err


def environment(**variables: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **variables}


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGINT, ExitCode.SIGINT), (signal.SIGTERM, ExitCode.SIGTERM)]
)
def test_row_37_a_download_that_is_stopped_goes_on(
    make_checkpoint: Make, tmp_path: Path, signum: signal.Signals, code: int
) -> None:
    folder = make_checkpoint(vocab_size=16384, hidden_size=256)
    hub = Hub({"me/mine": folder}, faults={"model.safetensors": [Fault(pause_s=0.004)]})
    with running_hub(hub):
        variables = environment(HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "hf"))
        command = [sys.executable, "-m", "localllm", "pull", "me/mine"]
        process = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
        end = time.monotonic() + 60
        while hub.sent_bytes["model.safetensors"] < 22_000_000 and time.monotonic() < end:
            time.sleep(0.01)
        process.send_signal(signum)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == code
        assert "Traceback" not in errors
        time.sleep(0.3)
        hub.sent_bytes.clear()
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert hub.sent_bytes["model.safetensors"] < (folder / "model.safetensors").stat().st_size


def test_row_40_what_a_model_says_ends_and_is_text(make_checkpoint: Make, localllm: Run) -> None:
    # Random weights never end by themselves, and their bytes are seldom UTF-8.
    outcome = localllm(
        "chat", str(make_checkpoint()), "hi", "--json", "--ignore-eos", "--ctx", "64"
    )
    assert outcome.code == 0
    found = json.loads(outcome.out)
    assert found["finish_reason"] == "length"
    assert found["usage"]["prompt_tokens"] + found["usage"]["completion_tokens"] == 64
    outcome.out.encode("utf-8")


def test_row_41_special_tokens_that_a_user_types_are_text(
    make_checkpoint: Make, localllm: Run
) -> None:
    folder = make_checkpoint()
    tokens = json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
    special = next(token["content"] for token in tokens if token["special"])

    def count(*flags: str) -> int:
        outcome = localllm(
            "chat", str(folder), f"a{special}b", "-n", "1", "--json", "--raw", *flags
        )
        usage: dict[str, int] = json.loads(outcome.out)["usage"]
        return usage["prompt_tokens"]

    assert count() > count("--parse-special")
