"""Published models, which lie in a folder that the user names."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import ROOT

# Read here, since the tests' own home has no variables of ours.
_FOLDER = os.environ.get("LOCALLLM_PUBLISHED_MODELS")
NAMES = ("smollm2", "gemma3", "qwen25")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test below this folder needs published models, and the time that they take."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.published)


@pytest.fixture(scope="session")
def models() -> Path:
    """A folder with checkpoints called as in `NAMES`."""
    if _FOLDER is None:
        pytest.skip(
            "LOCALLLM_PUBLISHED_MODELS names no folder; CONTRIBUTING.md says how to fill it"
        )
    folder = Path(_FOLDER)
    missing = [name for name in NAMES if not (folder / name / "config.json").is_file()]
    if missing:
        pytest.skip(f"{folder} has no checkpoint {', '.join(missing)}")
    return folder


@pytest.fixture(scope="session")
def qwen(models: Path) -> Path:
    """Qwen2.5-Coder-0.5B-Instruct: it calls tools, fills in code and writes JSON."""
    return models / "qwen25"


@pytest.fixture(scope="session")
def smollm(models: Path) -> Path:
    """SmolLM2-135M-Instruct, the smallest that answers questions."""
    return models / "smollm2"


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """In place of the other tests' single thread: these models are not tiny."""
    torch.set_num_threads(os.cpu_count() or 1)


@pytest.fixture(autouse=True)
def _threads(user_directories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")


def run(*arguments: str) -> dict[str, Any]:
    """What `localllm ARGUMENTS --json` says."""
    command = [sys.executable, "-m", "localllm", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, cwd=ROOT, timeout=500)
    assert done.returncode == 0, done.stderr.decode()
    said: dict[str, Any] = json.loads(done.stdout)
    return said
