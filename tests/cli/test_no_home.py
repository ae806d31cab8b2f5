"""Without a home folder, as in a container: what can work does, and what is missing is said."""

import pwd
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.errors import ExitCode, RequestError
from localllm.user.places import config_file, lost_places, prefix_folder
from localllm_kernels.cpu.build import BuildError

Run = Callable[..., Any]
XDG = ("XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME")


@pytest.fixture(autouse=True)
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels would be compiled for every test, as there is no place to keep them."""

    def refuse(folder: Path | None) -> None:
        assert folder is None
        raise BuildError("not in this test")

    monkeypatch.setattr("localllm_kernels.load_library", refuse)


@pytest.fixture
def no_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No HOME, and a user whom the system does not know; the working folder."""

    def unknown(uid: int) -> None:
        raise KeyError(uid)

    for name in ("HOME", "HF_HOME", *XDG):
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    # As the hub's client makes it of what it finds when it is imported.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", "~/.cache/huggingface/hub")
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def unwritable_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home that nobody can write to, root included; the working folder."""
    (tmp_path / "file").touch()
    for name in ("HF_HOME", *XDG):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "file" / "home"))
    cache = tmp_path / "file" / "home" / ".cache" / "huggingface" / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    folder = tmp_path / "working"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


WORKING = [
    ("--help",),
    ("--version",),
    ("chat", "pocket", "hi", "-n", "2"),
    ("chat", "pocket", "hi", "-n", "2", "--cache-disk", "16MiB"),
    ("ls",),
    ("show", "pocket"),
    ("doctor",),
    ("cache",),
    ("config", "get"),
    ("config", "path"),
    ("ps",),
]
REFUSED = [
    ("config", "set", "temp", "0.5"),
    ("sessions", "list"),
    ("chat", "pocket", "hi", "--session", "x"),
]


@pytest.mark.parametrize("words", WORKING, ids=" ".join)
@pytest.mark.parametrize("place", ["no_home", "unwritable_home"])
def test_what_keeps_nothing_works(
    localllm: Run, request: pytest.FixtureRequest, place: str, words: tuple[str, ...]
) -> None:
    folder = request.getfixturevalue(place)
    outcome = localllm(*words)
    assert outcome.code == ExitCode.OK, outcome.err
    assert outcome.out or outcome.err
    assert "internal error" not in outcome.err
    assert "Traceback" not in outcome.err
    assert not list(folder.iterdir())


@pytest.mark.parametrize("words", REFUSED, ids=" ".join)
@pytest.mark.parametrize("place", ["no_home", "unwritable_home"])
def test_what_has_to_be_kept_says_that_it_has_no_place(
    localllm: Run, request: pytest.FixtureRequest, place: str, words: tuple[str, ...]
) -> None:
    folder = request.getfixturevalue(place)
    outcome = localllm(*words)
    assert outcome.code == ExitCode.DISK, outcome.err
    assert "error: " in outcome.err
    assert ("HOME is not set" in outcome.err) == (place == "no_home")
    assert "internal error" not in outcome.err
    assert not list(folder.iterdir())


@pytest.mark.parametrize("words", [("pull", "a/b"), ("chat", "a/b", "hi"), ("show", "a/b")])
def test_downloads_have_no_place(localllm: Run, no_home: Path, words: tuple[str, ...]) -> None:
    outcome = localllm(*words)
    assert outcome.code == ExitCode.DISK
    assert "the user has no home folder" in outcome.err
    assert "set HOME, or HF_HOME" in outcome.err
    assert not list(no_home.iterdir())


def test_it_is_said_once_what_is_missing(
    localllm: Run, no_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lost_places() == list(XDG)
    monkeypatch.setenv("XDG_DATA_HOME", str(no_home))
    outcome = localllm("chat", "pocket", "hi", "-n", "2")
    assert outcome.err.count("HOME is not set") == 1
    assert "set XDG_CONFIG_HOME, XDG_CACHE_HOME to keep" in outcome.err
    for name in XDG:
        monkeypatch.setenv(name, str(no_home))
    assert lost_places() == []
    assert config_file() == no_home / "localllm" / "config.toml"
    assert "HOME" not in localllm("ls").err


@pytest.mark.usefixtures("no_home")
def test_a_folder_in_a_home_that_is_not_there_is_refused() -> None:
    with pytest.raises(RequestError, match="home directory") as caught:
        prefix_folder("~/prefixes")
    assert "set HOME" in caught.value.hint
