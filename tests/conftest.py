"""Fixtures: user directories in a temporary place, tiny random checkpoints and tokenizers."""

import fcntl
import itertools
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    # Read where a kernel is defined, so before the first import of one.
    os.environ.setdefault("TRITON_INTERPRET", "1")

from checkpoints import tiny_config, write_checkpoint
from fork_server import ForkingPopen, forking_processes
from interpreter import make_the_interpreter_quick

from localllm.operators.cpu_products import make_products_reproducible
from localllm_kernels.cpu.build import BuildError, load_library

make_the_interpreter_quick()
# No example fails because the machine does something else meanwhile.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")
# Before any test multiplies matrices; a command does it when it loads a model.
make_products_reproducible()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fresh-processes", action="store_true", help="Start each program, and fork none."
    )


@pytest.fixture(autouse=True, scope="session")
def _forking(pytestconfig: pytest.Config) -> Iterator[None]:
    # No GPU is used on both sides of a fork.
    if pytestconfig.getoption("--fresh-processes") or torch.cuda.is_available():
        yield
        return
    with forking_processes():
        yield


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test starts imports everything itself: for one about the start of a program."""
    if issubclass(subprocess.Popen, ForkingPopen):
        monkeypatch.setattr(subprocess, "Popen", ForkingPopen.__base__)


@pytest.fixture(autouse=True)
def _fresh_where_slow(request: pytest.FixtureRequest) -> None:
    if any(request.node.get_closest_marker(name) for name in ("slow", "alone", "published")):
        request.getfixturevalue("fresh_processes")


@pytest.fixture(autouse=True)
def _drawn_numbers() -> None:
    """What a test draws without a seed is the same in every run and order."""
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # the other way also keeps a traceback for a device that is never used: a millisecond
        torch.default_generator.manual_seed(0)


def _folder_of_this_run(name: str, factory: pytest.TempPathFactory) -> Path:
    """One for all processes that run tests at once."""
    root = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each has a folder of its own in that of the run
        root = root.parent
    folder = root / f"shared-{name}"
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


@pytest.fixture(scope="session")
def compiled_kernels(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the C library is kept, by the digest of its sources: compiled once for all runs."""
    if hasattr(pytestconfig, "cache"):
        folder = pytestconfig.cache.mkdir("kernels")
        folder.chmod(0o700)
    else:  # -p no:cacheprovider
        folder = _folder_of_this_run("kernels", tmp_path_factory)
    with (folder / "lock").open("w") as lock:
        # The other processes of this run wait instead of compiling it too.
        fcntl.flock(lock, fcntl.LOCK_EX)
        with suppress(BuildError):  # a machine without a compiler runs what needs none
            load_library(folder)
    return folder


@pytest.fixture(scope="session")
def read_tokenizers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where it is kept which vocabularies were read, so that each is once for all tests."""
    return _folder_of_this_run("tokenizers", tmp_path_factory)


@pytest.fixture(scope="session")
def _short_folders() -> Iterator[Iterator[Path]]:
    with tempfile.TemporaryDirectory(prefix="ll") as folder:
        yield (Path(folder) / str(number) for number in itertools.count())


@pytest.fixture
def runtime_directory(_short_folders: Iterator[Path]) -> Path:
    """A short name: that of a socket has at most 108 bytes."""
    folder = next(_short_folders)
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture(autouse=True)
def user_directories(
    tmp_path: Path,
    runtime_directory: Path,
    compiled_kernels: Path,
    read_tokenizers: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Path:
    """No test reads or writes the home of whoever runs it, or reaches a network."""
    home = tmp_path / "home"
    (home / "localllm").mkdir(parents=True)
    (home / "localllm" / "kernels").symlink_to(compiled_kernels)
    (home / "localllm" / "tokenizers").symlink_to(read_tokenizers)
    for name in list(os.environ):
        if name.startswith(("LOCALLLM_", "HF_", "LLAMA_")):
            monkeypatch.delenv(name)
    # Else a service's models would be found too.
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "ollama"))
    for name in ("HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME", "HF_HOME"):
        monkeypatch.setenv(name, str(home))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime_directory))
    # No engine outlives its test unless that is what the test is about.
    monkeypatch.setenv("LOCALLLM_KEEPALIVE", "0")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    # The tests' own processes hold all cores; more threads than those wait by spinning.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return home


@pytest.fixture
def make_checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a random checkpoint: `make_checkpoint(architecture, **config)`."""
    count = 0

    def make(architecture: str = "Qwen3ForCausalLM", **changes: Any) -> Path:
        nonlocal count
        count += 1
        return write_checkpoint(tmp_path / f"model{count}", tiny_config(architecture, **changes))

    return make


@pytest.fixture
def edit_json() -> Callable[..., None]:
    """A function that changes fields of a JSON file; a value of None removes the field."""

    def edit(path: Path, **changes: Any) -> None:
        value = json.loads(path.read_text())
        value.update(changes)
        path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))

    return edit


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny products gain nothing from more, and on a busy machine they lose by it."""
    torch.set_num_threads(1)
