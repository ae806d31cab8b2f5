"""A cache of a test's own, and the command in this process."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_hub import Hub, use_hub

from localllm.cli.main import run


@pytest.fixture
def hub_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, for calls in this process."""
    home = tmp_path / "hf"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(home / "hub"))
    monkeypatch.setattr("localllm.hub.transfer._PAUSE_S", 0.01)
    # The client sleeps a second where a connection was cut.
    monkeypatch.setattr("huggingface_hub.file_download.time", SimpleNamespace(sleep=lambda s: None))
    # What has come of a piece of this size is lost in a cut; by default 10 MB.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    return home


@pytest.fixture
def command(
    hub_home: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: `command(hub, "pull", REPO)`; a process takes half a second."""
    cache = str(hub_home / "hub")
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", cache)

    def call(hub: Hub, *words: str) -> tuple[int, str, str]:
        use_hub(hub, monkeypatch)
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO()))
        capfd.readouterr()
        return run(words), *capfd.readouterr()

    return call
