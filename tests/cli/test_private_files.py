"""What localllm writes for a user only that user reads; what cannot be written leaves no trace."""

import os
import resource
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.chat.store import SessionStore
from localllm.chat.transcript import Transcript, Turn
from localllm.cli.chat.saved import open_recorder
from localllm.cli.repl.line_editor import _open_history
from localllm.errors import DiskError, ExitCode
from localllm.files.private_files import write_new, write_private
from localllm.schedule.request import FinishReason
from localllm.user.places import config_file, history_file, sessions_file

Run = Callable[..., Any]
TURNS = (Turn("How are you?", "small", "Fine.", "", FinishReason.STOP, (1,)),)


@pytest.fixture
def path() -> Path:
    """The file of a user who has one conversation, `talk`."""
    SessionStore(sessions_file()).create(Transcript("small", None, TURNS), "talk")
    return sessions_file()


def modes(folder: Path) -> dict[str, str]:
    return {
        str(each.relative_to(folder)): oct(stat.S_IMODE(each.stat().st_mode))
        for each in folder.rglob("*")
        if "kernels" not in each.parts
    }


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_what_is_written_for_a_user_only_the_user_reads(
    localllm: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    umask: int,
) -> None:
    home = tmp_path / "new"
    home.mkdir()
    monkeypatch.setenv("XDG_DATA_HOME", str(home / "share" / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(home / "settings"))
    previous = os.umask(umask)
    try:
        recorder = open_recorder()
        recorder.save(Transcript("small", None, TURNS))
        monkeypatch.setattr(recorder.store(), "save", refuse)
        recorder.save(Transcript("small", None, TURNS * 2))
        list(_open_history().load_history_strings())
        assert localllm("config", "set", "temp", "0.5").code == 0
        for name in ("chat.md", "chat.json"):
            assert localllm("sessions", "export", "1", str(home / name)).code == 0
        found = modes(home)
    finally:
        os.umask(previous)
    assert {Path(name).name.partition("-1")[0] for name in found} >= {
        *("sessions.db", "sessions.db-wal", "sessions.db-shm", "transcript", "history"),
        *("config.toml", "chat.md", "chat.json"),
    }
    for name, mode in found.items():
        assert mode == ("0o700" if (home / name).is_dir() else "0o600"), name


def refuse(*arguments: object) -> None:
    raise DiskError("for a test")


def test_what_was_open_to_others_is_closed(localllm: Run, path: Path) -> None:
    config_file().write_text("temp = 0.5\n")
    history_file().touch()
    for each in (path, config_file(), history_file()):
        each.chmod(0o644)
    path.parent.chmod(0o755)
    _open_history()
    localllm("sessions", "list")
    localllm("config", "set", "temp", "0.6")
    for each in (path, config_file(), history_file()):
        assert stat.S_IMODE(each.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_an_existing_file_is_neither_written_nor_changed_by_an_export(
    localllm: Run, path: Path, tmp_path: Path
) -> None:
    file = tmp_path / "chat.md"
    file.write_text("mine")
    file.chmod(0o640)
    assert localllm("sessions", "export", "talk", str(file)).code == ExitCode.USAGE
    assert file.read_text() == "mine"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def without_room(write: Callable[[Path, bytes], None]) -> Callable[[Path, bytes], None]:
    """The same, where no file grows beyond five bytes."""

    def starved(path: Path, data: bytes) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5, before[1]))
        try:
            write(path, data)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    return starved


def test_an_export_that_found_no_room_leaves_nothing_in_the_way(
    localllm: Run, path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chat.md"
    with monkeypatch.context() as patch:
        patch.setattr("localllm.cli.draw.files.write_new", without_room(write_new))
        outcome = localllm("sessions", "export", "talk", str(file))
    assert outcome.code == ExitCode.DISK
    assert f"{file} cannot be written: File too large" in outcome.err
    assert "try: " in outcome.err
    assert not list(tmp_path.glob("*.part"))
    assert not file.exists()
    assert localllm("sessions", "export", "talk", str(file)).code == 0
    assert file.read_text().startswith("# Conversation")
    missing = localllm("sessions", "export", "talk", str(tmp_path / "no" / "chat.md"))
    assert missing.code == ExitCode.DISK
    assert "mkdir -p" in missing.err


def test_settings_that_found_no_room_are_as_they_were(
    localllm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert localllm("config", "set", "temp", "0.5").code == 0
    monkeypatch.setattr("localllm.cli.machine.config.write_private", without_room(write_private))
    outcome = localllm("config", "set", "seed", "12345")
    assert outcome.code == ExitCode.DISK
    assert config_file().read_text() == "temp = 0.5\n"
    assert not list(config_file().parent.glob("*.part"))


def test_a_history_that_is_no_file_is_kept_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    history_file().parent.mkdir(exist_ok=True)
    os.mkfifo(history_file())
    _open_history().append_string("Is it?")  # does not wait for who reads
