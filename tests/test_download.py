"""Models from a hub, over loopback, through the command as a user runs it."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_hub import serve_hub

from localllm.catalog import ModelSource
from localllm.download import _check_links, fetch_model
from localllm.errors import CheckpointError, ExitCode

ROOT = Path(__file__).parents[1]
REPO = "tester/tiny-model"


def chat(endpoint: str, home: Path, *arguments: str, **environment: str) -> tuple[int, str, str]:
    return localllm(endpoint, home, "chat", *arguments, **environment)


def localllm(
    endpoint: str, home: Path, *arguments: str, **environment: str
) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, "-m", "localllm", *arguments],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(home / "hf"),
            "HF_HUB_DISABLE_XET": "1",
            **environment,
        },
    )
    return done.returncode, done.stdout, done.stderr


def test_a_model_is_fetched_once_and_then_runs_without_a_network(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    arguments = (REPO, "Hello", "--greedy", "-n", "8")
    folder = make_checkpoint()
    # What must never be fetched.
    (folder / "modeling_tiny.py").write_text("raise SystemExit(99)")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    with serve_hub(REPO, folder) as endpoint:
        code, first, errors = chat(endpoint, tmp_path, *arguments)
        assert code == 0, errors
    code, second, errors = chat("http://127.0.0.1:9", tmp_path, *arguments)
    assert code == 0, errors
    assert first == second
    fetched = {path.name for path in (tmp_path / "hf").rglob("*")}
    assert "model.safetensors" in fetched
    assert not fetched & {"modeling_tiny.py", "pytorch_model.bin"}
    code, third, _ = chat("http://127.0.0.1:9", tmp_path, *arguments, HF_HUB_OFFLINE="1")
    assert (code, third) == (0, first)


def test_a_card_needs_no_weights(make_checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    with serve_hub(REPO, make_checkpoint()) as endpoint:
        code, out, errors = localllm(endpoint, tmp_path, "show", REPO, "--json")
    assert code == 0, errors
    card = json.loads(out)
    assert card["layers"] == 2
    assert "parameters" not in card
    assert not list((tmp_path / "hf").rglob("*.safetensors"))


def test_without_a_network_and_without_the_model_it_is_exit_code_4(tmp_path: Path) -> None:
    code, out, errors = chat("http://127.0.0.1:9", tmp_path, REPO, "Hello")
    assert code == ExitCode.NETWORK
    assert out == ""
    assert REPO in errors
    assert "Traceback" not in errors


def test_a_repository_that_is_not_there_is_exit_code_3(tmp_path: Path) -> None:
    with serve_hub("some/other", tmp_path) as endpoint:
        code, _, errors = chat(endpoint, tmp_path, REPO, "Hello")
    assert code == ExitCode.MODEL
    assert REPO in errors


def test_a_gated_repository_is_exit_code_3_and_names_the_way_in(tmp_path: Path) -> None:
    with serve_hub(REPO, tmp_path, gated=True) as endpoint:
        code, _, errors = chat(endpoint, tmp_path, REPO, "Hello", HF_TOKEN="hf_secret")
    assert code == ExitCode.MODEL
    assert "HF_TOKEN" in errors
    assert "hf_secret" not in errors


def test_a_folder_is_taken_as_it_is(tmp_path: Path) -> None:
    assert fetch_model(ModelSource("x", folder=tmp_path)) == tmp_path


def test_a_link_out_of_the_cache_is_refused(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c"
    blobs = tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "good").write_text("{}")
    (snapshot / "config.json").symlink_to(blobs / "good")
    _check_links(snapshot)
    (tmp_path / "secret").write_text("x")
    (snapshot / "tokenizer.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        _check_links(snapshot)
