"""What a user's saved conversations meet on a disk: damage, locks, odd files, no room."""

import json
import os
import re
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_server import SmallServer, small_server
from window import Window

from localllm.chat.store import SessionStore
from localllm.chat.transcript import Transcript, Turn
from localllm.cli.chat.saved import open_recorder
from localllm.errors import ExitCode
from localllm.schedule.request import FinishReason
from localllm.user.places import sessions_file

Run = Callable[..., Any]
TURNS = (
    Turn("How are you?", "small", "Fine.", "Hm.", FinishReason.STOP, (1, 2, 3)),
    Turn("And now?", "small", "Still.", "", FinishReason.STOP, (4,)),
)


@pytest.fixture
def server() -> Iterator[SmallServer]:
    with small_server() as running:
        yield running


@pytest.fixture
def path() -> Path:
    """The file of a user who has one conversation, `talk`."""
    store = SessionStore(sessions_file())
    store.create(Transcript("small", "Be brief.", TURNS), "talk")
    store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    return sessions_file()


def questions(name: str = "talk") -> list[str]:
    store = SessionStore(sessions_file())
    found = [turn.question for turn in store.get(name).transcript.turns]
    store.close()
    return found


WITHOUT_CONSTRAINTS = (
    "PRAGMA writable_schema = ON",
    "UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE type = 'table'",
    "PRAGMA writable_schema = RESET",
)
VIEW = "CREATE VIEW turns AS SELECT 1 AS session_id, 0 AS position, 'Q' AS question"
DAMAGES = {
    "a question that is bytes": ("UPDATE turns SET question = x'ff00'",),
    "an answer that is bytes": ("UPDATE turns SET answer = x'4142'",),
    "thoughts that are bytes": ("UPDATE turns SET thinking = x'4142'",),
    "a turn's model that is bytes": ("UPDATE turns SET model = x'4142'",),
    "an answer that is not UTF-8": ("UPDATE turns SET answer = CAST(x'c328ff' AS TEXT)",),
    "a title that is not UTF-8": ("UPDATE turns SET question = CAST(x'c328ff' AS TEXT)",),
    "a model that is bytes": ("UPDATE sessions SET model = x'4142'",),
    "a system prompt that is bytes": ("UPDATE sessions SET system = x'4142'",),
    "a name that is bytes": ("UPDATE sessions SET name = x'74616c6b'",),
    "a time that is a text": ("UPDATE sessions SET created_s = 'yesterday'",),
    "a time without end": ("UPDATE sessions SET updated_s = 9e999",),
    "a time before all times": ("UPDATE sessions SET updated_s = -9e999",),
    "a revision that is a text": ("UPDATE sessions SET revision = 'x'",),
    "a revision that cannot be counted on": ("UPDATE sessions SET revision = 9223372036854775807",),
    "tokens that are cut": ("UPDATE turns SET token_ids = x'010203'",),
    "tokens that are a text": ("UPDATE turns SET token_ids = 'abcd'",),
    "a negative token": ("UPDATE turns SET token_ids = x'feffffff'",),
    "an unknown end": ("UPDATE turns SET finish_reason = 'tired'",),
    "an end that is bytes": ("UPDATE turns SET finish_reason = x'00'",),
    "the first turn missing": ("DELETE FROM turns WHERE position = 0",),
    "a place that is a text": ("UPDATE turns SET position = 'x' WHERE position = 1",),
    "no turns table": ("DROP TABLE turns",),
    "no sessions table": ("DROP TABLE sessions",),
    "no column": ("ALTER TABLE turns DROP COLUMN thinking",),
    "another column": ("ALTER TABLE sessions RENAME COLUMN system TO sistem",),
    "a view in the place of a table": ("DROP TABLE turns", VIEW),
    "nothing may be inserted": (
        "CREATE TRIGGER no BEFORE INSERT ON turns BEGIN SELECT RAISE(ABORT, 'no'); END",
    ),
    "a negative version": ("PRAGMA user_version = -3",),
    "a version from far away": ("PRAGMA user_version = 2147483647",),
    "a version that was lost": ("PRAGMA user_version = 0",),
    "no question": (*WITHOUT_CONSTRAINTS, "UPDATE turns SET question = NULL"),
    "no model": (*WITHOUT_CONSTRAINTS, "UPDATE sessions SET model = NULL"),
    "no revision": (*WITHOUT_CONSTRAINTS, "UPDATE sessions SET revision = NULL"),
    "no time": (*WITHOUT_CONSTRAINTS, "UPDATE sessions SET updated_s = NULL"),
    "no tokens": (*WITHOUT_CONSTRAINTS, "UPDATE turns SET token_ids = NULL"),
    "turns without a conversation": ("DELETE FROM sessions", "DELETE FROM sqlite_sequence"),
}


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(each, id=name, marks=[pytest.mark.slow] if i % 3 else [])
        for i, (name, each) in enumerate(DAMAGES.items())
    ],
)
def test_damage_in_a_sound_file_sets_it_aside_and_the_conversation_goes_on(
    localllm: Run, server: SmallServer, path: Path, damage: tuple[str, ...]
) -> None:
    with sqlite3.connect(path, isolation_level=None) as db:
        for statement in damage:
            db.execute(statement)
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    db.close()
    before = path.read_bytes()
    for words in (("list",), ("show", "talk"), ("export", "talk"), ("rename", "talk", "other")):
        outcome = localllm("sessions", *words)
        assert outcome.code in (ExitCode.OK, ExitCode.USAGE, ExitCode.DISK), outcome.err
        assert "internal error" not in outcome.err
        if outcome.code == ExitCode.OK and words[0] == "rename":
            localllm("sessions", "rename", "other", "talk")
    for question in ("Is it?", "Really?"):
        outcome = localllm("chat", "--remote", server.url, "--session", "talk", question)
        assert outcome.code == 0, outcome.err
        assert outcome.out == "It is so.\n"
    assert questions()[-2:] == ["Is it?", "Really?"]
    [aside] = path.parent.glob("sessions.damaged-*.db")
    if damage[0] != DAMAGES["nothing may be inserted"][0]:  # which is met when it is saved
        with sqlite3.connect(aside) as db:
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        db.close()
        assert aside.read_bytes() == before


def test_the_last_conversation_of_a_damaged_file_goes_on_as_a_new_one(
    localllm: Run, server: SmallServer, path: Path
) -> None:
    path.write_bytes(b"not a database at all" * 400)
    listed = localllm("sessions", "list")
    assert listed.code == ExitCode.DISK
    assert "try: localllm chat, which keeps the file under another name" in listed.err
    outcome = localllm("chat", "--remote", server.url, "--continue", "Is it?")
    assert outcome.code == 0
    assert "the file is kept as" in outcome.err
    assert questions("1") == ["Is it?"]


@pytest.mark.parametrize("lock", ["BEGIN IMMEDIATE", "PRAGMA locking_mode = EXCLUSIVE"])
def test_a_locked_file_is_waited_for_a_second_and_told(
    localllm: Run, server: SmallServer, path: Path, lock: str
) -> None:
    other = sqlite3.connect(path, isolation_level=None)
    other.execute(lock)
    if "EXCLUSIVE" in lock:
        other.execute("BEGIN IMMEDIATE")
        other.execute("UPDATE sessions SET revision = revision")
    began = time.monotonic()
    outcome = localllm("chat", "--remote", server.url, "--session", "talk", "Is it?")
    assert 0.9 < time.monotonic() - began < 2.5
    assert outcome.code == ExitCode.DISK
    assert outcome.out == ""
    assert "error: the saved sessions are locked by another program" in outcome.err
    assert "try: " in outcome.err
    began = time.monotonic()
    outcome = localllm("sessions", "list")
    assert time.monotonic() - began < 2.5
    # Who only reads waits for nobody who writes.
    assert outcome.code == (ExitCode.DISK if "EXCLUSIVE" in lock else ExitCode.OK)
    assert ("are locked" in outcome.err) == ("EXCLUSIVE" in lock)
    other.execute("ROLLBACK")
    other.close()
    assert questions() == ["How are you?", "And now?"]


def test_a_conversation_goes_on_beside_a_lock_and_is_saved_when_it_is_gone(
    server: SmallServer, path: Path, user_directories: Path
) -> None:
    command = ["-m", "localllm", "chat", "--remote", server.url, "--session", "talk"]
    window = Window(command, 100, 40, user_directories)
    window.wait_for(r"\n> ?")
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    window.say("Is it?")
    window.wait_for(r"are locked by another program; this conversation is kept in")
    window.wait_for(r"It is so\.")
    window.say("/save other")
    window.wait_for("error: the saved sessions are locked")
    other.execute("ROLLBACK")
    window.say("Really?")
    window.wait_for(r"Really\?(.|\n)*It is so\.(.|\n)*whole answer")
    window.settle()
    window.close()
    assert questions() == ["How are you?", "And now?", "Is it?", "Really?"]


def make_folder(path: Path) -> None:
    path.mkdir()


def make_link_to_nowhere(path: Path) -> None:
    path.symlink_to(path.parent / "gone" / "sessions.db")


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (os.mkfifo, "it is a named pipe, not a file"),
        (make_folder, "it is a folder, not a file"),
        (make_link_to_nowhere, "it is a dangling link"),
    ],
    ids=["named pipe", "folder", "link to nowhere"],
)
def test_what_is_no_file_is_told_and_the_conversation_goes_on(
    localllm: Run, make: Callable[[Path], None], word: str
) -> None:
    path = sessions_file()
    path.parent.mkdir(exist_ok=True)
    make(path)
    for words in (("sessions", "list"), ("chat", "--session", "talk", "hi", "-m", "pocket")):
        outcome = localllm(*words)
        assert outcome.code == ExitCode.DISK
        assert f"error: the saved sessions cannot be used: {word}\n  {path}" in outcome.err
    warnings: list[str] = []
    recorder = open_recorder()
    recorder._warn = warnings.append
    recorder.save(Transcript("small", None, TURNS))
    assert len(warnings) == 1
    assert word in warnings[0]
    [lines] = path.parent.glob("transcript-*.jsonl")
    assert [json.loads(line)["answer"] for line in lines.read_text().splitlines()] == [
        "Fine.",
        "Still.",
    ]


@pytest.mark.parametrize("place", ["/proc/1/localllm-none", "file"])
def test_a_folder_that_cannot_be_made_is_told_and_stops_nothing(
    localllm: Run,
    server: SmallServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
) -> None:
    (tmp_path / "file").write_text("in the place of a folder")
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / place))
    outcome = localllm("chat", "--remote", server.url, "--session", "talk", "Is it?")
    assert outcome.code == ExitCode.DISK
    assert "error: the saved sessions cannot be used" in outcome.err
    window = Window(
        ["-m", "localllm", "chat", "--remote", server.url], 120, 30, Path(tmp_path / place)
    )
    window.wait_for(r"\n> ?")
    window.say("Is it?")
    screen = window.wait_for(r"It is so\.")
    assert re.search(r"the saved sessions cannot be used(.|\n)*not saved", screen)
    window.say("/exit")
    assert window.exit_code() == 0
