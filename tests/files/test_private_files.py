"""What localllm keeps and trusts is for this user alone; what is another's is left alone."""

import ctypes
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from localllm.engine.chosen_operators import library_folder
from localllm.files.private_files import (
    make_private_folder,
    new_private,
    open_private,
    private_descriptor,
    private_folder,
    read_private,
    write_new,
    write_private,
)
from localllm.hub.verified import VerifiedFiles
from localllm.operators.tuning_file import TuningFile
from localllm.operators.verdict import KIND, Outcome, Verdict, VerdictFile
from localllm.user.places import cache_folder
from localllm_kernels.compiling.choice import Piece
from localllm_kernels.compiling.tiles import TileConfig
from localllm_kernels.cpu import build
from localllm_kernels.cpu.build import load_library
from localllm_kernels.cpu.declarations import Declarations

WITHOUT = "nothing is kept"
VERDICT = Verdict("a GPU", "a shape", (Outcome(Piece.NORMS, "norm", 1, "good"),))


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture
def somebody_else(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From its call on, whatever is there belongs to another user."""

    def change() -> None:
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    return change


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_folders_and_files_are_closed_to_others_whatever_the_umask(
    tmp_path: Path, umask: int
) -> None:
    folder = tmp_path / "a" / "b"
    before = os.umask(umask)
    try:
        assert private_folder(folder, WITHOUT) == folder
        write_private(folder / "c", b"text")
        write_new(folder / "d", b"more")
        os.close(private_descriptor(folder / "e", os.O_RDWR))
    finally:
        os.umask(before)
    assert (mode(folder.parent), mode(folder)) == (0o700, 0o700)
    assert {path.name: mode(path) for path in folder.iterdir()} == dict.fromkeys("cde", 0o600)
    assert read_private(folder / "c", 4) == b"text"
    assert read_private(folder / "d", 4) == b"more"


def test_a_folder_that_is_open_to_others_is_closed(tmp_path: Path) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    for before in (0o777, 0o775, 0o755, 0o1777):
        folder.chmod(before)
        assert private_folder(folder, WITHOUT) == folder
        assert mode(folder) == 0o700


def test_a_file_that_is_open_to_others_is_closed_and_one_that_is_read_only_stays_so(
    tmp_path: Path,
) -> None:
    path = tmp_path / "file"
    path.touch()
    for before, after in ((0o666, 0o600), (0o644, 0o600), (0o444, 0o400), (0o400, 0o400)):
        path.chmod(before)
        os.close(private_descriptor(path, os.O_RDONLY | os.O_APPEND))
        assert mode(path) == after


def test_what_stays_open_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)  # of a file system that has no modes
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: None)
    assert private_folder(tmp_path, WITHOUT) is None
    assert "other users can write to it" in caplog.text
    with pytest.raises(OSError, match="other users can write to it"):
        make_private_folder(tmp_path)


def test_another_s_folder_is_not_used_and_that_is_said_once(
    tmp_path: Path, somebody_else: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    somebody_else()
    for _ in range(3):
        assert private_folder(tmp_path, WITHOUT) is None
    assert caplog.text.count(f"{WITHOUT}: {tmp_path}: it belongs to another user") == 1
    with pytest.raises(OSError, match="belongs to another user"):
        make_private_folder(tmp_path)


def test_what_is_in_the_way_of_a_folder_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    assert private_folder(tmp_path / "file", WITHOUT) is None
    assert private_folder(tmp_path / "file" / "folder", WITHOUT) is None
    assert caplog.text.count("Not a directory") == 2


def test_a_file_that_another_user_made_or_may_change_is_not_read(
    tmp_path: Path, somebody_else: Callable[[], None]
) -> None:
    path = tmp_path / "file"
    write_private(path, b"text")
    path.chmod(0o664)
    with pytest.raises(OSError, match="other users can write"):
        read_private(path, 10)
    path.chmod(0o644)
    assert read_private(path, 10) == b"text"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="a named pipe"):
        open_private(tmp_path / "pipe")
    with pytest.raises(OSError, match="a named pipe"):
        private_descriptor(tmp_path / "pipe", os.O_RDWR)
    somebody_else()
    with pytest.raises(OSError, match="belongs to another user"):
        read_private(path, 10)
    with pytest.raises(OSError, match="belongs to another user"):
        private_descriptor(path, os.O_RDWR)


def test_a_file_that_is_not_finished_is_no_file(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()

    def write_half() -> None:
        with new_private(tmp_path / "kept" / "file") as file:
            file.write(b"half")
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert not list((tmp_path / "kept").iterdir())


def test_a_new_file_takes_no_other_one_s_place(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    folder.mkdir()
    write_new(folder / "file", b"mine")
    (folder / "link").symlink_to("nowhere")
    for name in ("file", "link"):
        with pytest.raises(FileExistsError):
            write_new(folder / name, b"other")
    assert (folder / "file").read_bytes() == b"mine"
    assert sorted(path.name for path in folder.iterdir()) == ["file", "link"]


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A C compiler that copies a library that is here, and counts its calls."""
    script, calls = tmp_path / "cc", tmp_path / "calls"
    library = Path(shutil.which("true") or "/bin/true")
    script.write_text(
        "#!/bin/sh\n"
        'while [ "$1" != -o ]; do shift; done\n'
        f'echo "$2" >> {calls}\ncp {library} "$2"; chmod 777 "$2"\n'
    )
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    # What the stand-in makes is no library, and has no functions.
    monkeypatch.setattr(ctypes, "CDLL", lambda path: path)
    monkeypatch.setattr(build, "DECLARATIONS", Declarations(""))
    return calls


def links(calls: Path) -> int:
    """How often a library was made."""
    text = calls.read_text() if calls.exists() else ""
    return sum(line.endswith(".so") for line in text.splitlines())


@pytest.mark.usefixtures("no_umask")
def test_the_compiled_library_is_this_user_s_alone(tmp_path: Path, fake_compiler: Path) -> None:
    folder = tmp_path / "kernels"
    assert private_folder(folder, WITHOUT) == folder
    library = Path(str(load_library(folder)))
    assert (library.parent, mode(library)) == (folder, 0o700)
    assert list(folder.iterdir()) == [library]
    load_library(folder)
    assert links(fake_compiler) == 1
    # What others may have written is not loaded, but made anew.
    for spoil in (lambda: library.chmod(0o777), lambda: make_link(library)):
        spoil()
        load_library(folder)
        assert mode(library) == 0o700
        assert not library.is_symlink()
    assert links(fake_compiler) == 3


def make_link(library: Path) -> None:
    library.rename(library.with_name("elsewhere"))
    library.symlink_to("elsewhere")


def test_another_s_library_is_not_loaded(
    tmp_path: Path, fake_compiler: Path, somebody_else: Callable[[], None]
) -> None:
    (tmp_path / "kept").mkdir()
    load_library(tmp_path / "kept")
    somebody_else()
    load_library(tmp_path / "kept")
    assert links(fake_compiler) == 2


def test_without_a_folder_the_library_is_made_once_for_the_process(
    monkeypatch: pytest.MonkeyPatch, fake_compiler: Path, somebody_else: Callable[[], None]
) -> None:
    (cache_folder("kernels") / "x").touch()
    somebody_else()
    assert library_folder() is None
    build._compile_for_this_process.cache_clear()
    places = {str(load_library(library_folder())) for _ in range(3)}
    build._compile_for_this_process.cache_clear()
    [place] = places
    assert not Path(place).parent.exists()
    assert cache_folder("kernels") not in Path(place).parents
    assert links(fake_compiler) == 1


@pytest.mark.usefixtures("no_umask")
def test_tunings_verdicts_and_checks_are_kept_for_this_user_alone(
    tmp_path: Path, somebody_else: Callable[[], None], caplog: pytest.LogCaptureFixture
) -> None:
    config = TileConfig(16, 32, 64, 4, 1)
    weights = tmp_path / "weights"
    weights.write_text("x")
    tunings, verdicts, verified = TuningFile.of("gpu"), VerdictFile.of("a", "b"), VerifiedFiles()
    tunings.add("key", config)
    verdicts.write(VERDICT)
    verified.add(weights, "0" * 64)
    kinds = [cache_folder(name) for name in ("tunings", KIND, "downloads")]
    files = [path for kind in kinds for path in kind.iterdir()]
    assert len(files) >= 3
    assert {mode(kind) for kind in kinds} == {0o700}
    assert {mode(path) for path in files} == {0o600}
    assert tunings.read().found == {"key": config}
    assert verdicts.read() == VERDICT
    assert verified.knows(weights, "0" * 64)
    somebody_else()
    assert tunings.read().found == {}
    assert verdicts.read() is None
    assert not verified.knows(weights, "0" * 64)
    tunings.add("other", config)
    verdicts.write(VERDICT)
    verified.add(weights, "0" * 64)
    assert caplog.text.count("it belongs to another user") == 3
