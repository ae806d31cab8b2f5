"""`localllm serve` as it is typed; what it answers is tested in tests/server."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from localllm.cli.serve.command import _keys_in
from localllm.errors import ExitCode
from localllm.server.served_name import name_for_clients


def test_an_open_address_needs_a_key(localllm: Callable[..., Any]) -> None:
    outcome = localllm("serve", "pocket", "--host", "0.0.0.0")
    assert outcome.code == ExitCode.USAGE
    assert "--api-key-file" in outcome.err
    assert localllm("serve", "pocket", "--api-key", "").code == ExitCode.USAGE


def test_limits_are_printed(localllm: Callable[..., Any]) -> None:
    assert "body bytes" in localllm("limits").out
    assert json.loads(localllm("limits", "--json").out)["samples"] == 8


def test_a_model_that_cannot_be_served_is_told_before_anything_listens(
    localllm: Callable[..., Any],
) -> None:
    assert localllm("serve", "no-such-model-at-all").code == ExitCode.MODEL
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    outcome = localllm("serve", "pocket", "--device", "cuda")
    assert outcome.code == ExitCode.MEMORY
    assert "no usable GPU" in outcome.err


def test_a_port_in_use_is_told_before_the_model_is_loaded(
    localllm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.attach.engine_client.EngineClient.start", pytest.fail)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = localllm("serve", "pocket", "--port", port)
    assert outcome.code == ExitCode.USAGE
    assert f"port {port}" in outcome.err
    for key in ("", "two words", "schlüssel", "key\n"):
        assert localllm("serve", "pocket", "--api-key", key).code == ExitCode.USAGE


def test_a_folder_is_served_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "models" / "mine"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    for typed in (".", "./", "../mine", "./../mine", str(folder), f"{folder}/", "~/models/mine"):
        assert name_for_clients(typed, folder) == "mine"
    monkeypatch.chdir(tmp_path)
    assert name_for_clients("models/mine", Path("models/mine")) == "mine"
    for kept in ("qwen3-0.6b", "Qwen/Qwen3-0.6B", "org/mine", "~nobody-at-all/x", "a\0b"):
        assert name_for_clients(kept, folder) == kept
    snapshot = tmp_path / "hub" / "models--Qwen--Qwen3-0.6B" / "snapshots" / "c1899de2"
    snapshot.mkdir(parents=True)
    assert name_for_clients(str(snapshot), snapshot) == "Qwen/Qwen3-0.6B"


def test_keys_are_read_from_a_file(localllm: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    path.write_text("one\n\n two \r\n")
    assert _keys_in(path) == ["one", "two"]
    for text in ("\n", "two words\n", "schlüssel"):
        said = "printable" if text.strip() else "has none"
        path.write_text(text)
        outcome = localllm("serve", "pocket", "--host", "0.0.0.0", "--api-key-file", str(path))
        assert outcome.code == ExitCode.USAGE
        assert said in outcome.err
    missing = localllm("serve", "pocket", "--api-key-file", str(tmp_path / "none"))
    assert missing.code == ExitCode.USAGE
    assert "none" in missing.err


def test_replicas_need_ray_which_is_told_before_anything_else(
    localllm: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.replicas.scale.find_spec", lambda name: None)
    outcome = localllm("serve", "pocket", "--replicas", "2")
    assert outcome.code == ExitCode.USAGE
    assert "pip install 'localllm[ray]'" in outcome.err
    assert localllm("serve", "pocket", "--replicas", "two").code == ExitCode.USAGE
