"""Saved conversations survive what happens to files, and a chat survives what happens to them."""

import json
import multiprocessing
import os
import signal
import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from localllm.chat.database import MIGRATIONS, DamagedError, set_aside
from localllm.chat.recorder import Recorder
from localllm.chat.store import ConflictError, SessionStore
from localllm.chat.transcript import Transcript, Turn
from localllm.errors import DiskError, RequestError
from localllm.schedule.request import FinishReason
from localllm.user.places import sessions_file

FIRST = Turn("How are you?", "pocket", "Fine.", "Hm.", FinishReason.STOP, (1, 2, 3))
SECOND = Turn("And \ud800 now?", "pocket", "Still", "", None, (4,))


def transcript(*turns: Turn, system: str | None = "Be brief.") -> Transcript:
    return Transcript("pocket", system, turns)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "data" / "sessions.db"


@pytest.fixture
def recorder(path: Path) -> tuple[Recorder, list[str]]:
    warnings: list[str] = []
    return Recorder(path, warnings.append), warnings


def test_what_is_saved_is_found_again(path: Path) -> None:
    store = SessionStore(path)
    session = store.create(transcript(FIRST), "greeting")
    session = store.save(session, transcript(FIRST, SECOND))
    other = store.create(transcript(FIRST))
    store.close()
    store = SessionStore(path)
    found = store.get("greeting")
    # A lone surrogate, which no file takes, is replaced.
    assert found.transcript.turns == [FIRST, replace(SECOND, question="And ? now?")]
    assert (found.transcript.system, found.transcript.model) == ("Be brief.", "pocket")
    assert found.revision == session.revision
    assert store.get(str(other.id)).transcript.turns == [FIRST]
    assert [row.id for row in store.rows()] == [other.id, session.id]
    assert [row.num_turns for row in store.rows()] == [1, 2]
    assert store.latest() == store.load(other.id)
    store.remove(other.id)
    assert [row.name for row in store.rows()] == ["greeting"]


def test_nobody_else_reads_them(path: Path) -> None:
    SessionStore(path).create(transcript(FIRST))
    for each in path.parent.iterdir():
        assert each.stat().st_mode & 0o077 == 0


def test_turns_that_are_taken_back_are_gone(path: Path) -> None:
    store = SessionStore(path)
    session = store.create(transcript(FIRST, SECOND))
    session = store.save(session, transcript(FIRST))
    other = replace(FIRST, answer="Well.")
    session = store.save(session, transcript(other, SECOND, FIRST))
    assert [turn.answer for turn in store.load(session.id).transcript.turns] == [
        "Well.",
        "Still",
        "Fine.",
    ]


def test_a_name_is_taken_once(path: Path) -> None:
    store = SessionStore(path)
    store.create(transcript(FIRST), "one")
    two = store.create(transcript(FIRST), "two")
    with pytest.raises(RequestError, match="already"):
        store.create(transcript(FIRST), "one")
    with pytest.raises(RequestError, match="already"):
        store.rename(two, "one")
    assert store.rename(two, "three").name == "three"
    with pytest.raises(RequestError, match="no session") as caught:
        store.get("thre")
    assert "three" in caught.value.where


def test_two_who_go_on_with_one_session_do_not_mix(path: Path) -> None:
    one, two = SessionStore(path), SessionStore(path)
    session = one.create(transcript(FIRST))
    same = two.load(session.id)
    one.save(session, transcript(FIRST, SECOND))
    with pytest.raises(ConflictError):
        two.save(same, transcript(FIRST, FIRST))


def test_a_recorder_goes_on_as_a_new_session_then(
    path: Path, recorder: tuple[Recorder, list[str]]
) -> None:
    mine, warnings = recorder
    mine.save(transcript(FIRST))
    store = SessionStore(path)
    (row,) = store.rows()
    store.save(store.load(row.id), transcript(SECOND))
    mine.save(transcript(FIRST, FIRST))
    mine.save(transcript(FIRST, FIRST, FIRST))
    assert sorted(row.num_turns for row in store.rows()) == [1, 3]
    assert len(warnings) == 1
    assert "elsewhere" in warnings[0]


def test_an_answer_is_saved_while_it_grows(path: Path) -> None:
    now = [0.0]
    mine = Recorder(path, pytest.fail, clock=lambda: now[0])
    mine.save(transcript(Turn("Q")))
    store, asked = SessionStore(path), 0

    def growing() -> Transcript:
        nonlocal asked
        asked += 1
        return transcript(Turn("Q", answer="x" * asked))

    for _ in range(10):
        now[0] += 0.2
        mine.flush(growing)
    assert 3 <= asked <= 4  # not for every token
    latest = store.latest()
    assert latest is not None
    assert latest.transcript.turns[0].answer == "x" * asked
    assert latest.transcript.turns[0].finish_reason is None


def _say_for_ever(path: Path) -> None:
    mine, answer = Recorder(path, print), ""
    while True:
        answer += "word "
        mine.save(transcript(FIRST, Turn("Q", answer=answer)))


def test_a_kill_leaves_what_was_said(path: Path) -> None:
    process = multiprocessing.get_context("spawn").Process(target=_say_for_ever, args=(path,))
    process.start()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        time.sleep(0.05)
        if path.exists() and path.stat().st_size > 8192:
            latest = SessionStore(path).latest()
            if latest is not None and len(latest.transcript.turns[1].answer) > 50:
                break
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    latest = SessionStore(path).latest()
    assert latest is not None
    turns = latest.transcript.turns
    assert turns[0] == FIRST
    assert set(turns[1].answer.split()) == {"word"}
    assert len(turns[1].answer) > 50


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"not a database at all" * 400),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + os.urandom(8192)),
        lambda path: path.write_bytes(path.read_bytes()[:5000]),
        lambda path: path.write_bytes(path.read_bytes().replace(b"TABLE turns", b"TABLE \xffurns")),
    ],
    ids=["no database", "overwritten", "cut", "a schema that is not UTF-8"],
)
def test_a_damaged_file_is_set_aside_and_the_chat_goes_on(
    path: Path, recorder: tuple[Recorder, list[str]], damage: Callable[[Path], int]
) -> None:
    store = SessionStore(path)
    for i in range(40):
        store.create(transcript(FIRST, replace(FIRST, answer="x" * 500)), f"s{i}")
    store.db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    damage(path)
    before = path.read_bytes()
    with pytest.raises(DamagedError):
        SessionStore(path)
    mine, warnings = recorder
    mine.save(transcript(FIRST))
    assert len(warnings) == 1
    (aside,) = path.parent.glob("sessions.damaged-*.db")
    assert str(aside) in warnings[0]
    assert aside.read_bytes() == before
    assert [row.num_turns for row in SessionStore(path).rows()] == [1]


def test_damage_in_the_middle_of_a_chat(
    path: Path, recorder: tuple[Recorder, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, warnings = recorder
    mine.begin(name="talk")
    mine.save(transcript(FIRST))

    def broken(*arguments: object) -> None:
        raise DamagedError("for a test", path)

    monkeypatch.setattr(mine.store(), "save", broken)
    mine.save(transcript(FIRST, SECOND))
    assert "damaged" in warnings[0]
    found = SessionStore(path).get("talk")
    assert len(found.transcript.turns) == 2


def test_a_newer_file_is_left_alone_and_the_chat_goes_to_lines(
    path: Path, recorder: tuple[Recorder, list[str]]
) -> None:
    SessionStore(path).close()
    with sqlite3.connect(path) as db:
        db.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    with pytest.raises(DiskError, match="newer"):
        SessionStore(path)
    mine, warnings = recorder
    mine.save(transcript(FIRST))
    mine.flush(lambda: transcript(FIRST, SECOND))
    mine.save(transcript(FIRST, replace(SECOND, question="And now?")))
    (lines,) = path.parent.glob("transcript-*.jsonl")
    assert len(warnings) == 1
    assert str(lines) in warnings[0]
    kept = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(turn["position"], turn["answer"]) for turn in kept] == [(0, "Fine."), (1, "Still")]
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS) + 1,)


def test_a_lock_that_is_held_does_not_stop_the_chat(
    path: Path, recorder: tuple[Recorder, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.chat.recorder.PATIENCE_S", 0.1)
    mine, warnings = recorder
    mine.save(transcript(FIRST))
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    mine.save(transcript(FIRST, SECOND))
    assert "locked" in warnings[0]
    assert len(list(path.parent.glob("transcript-*.jsonl"))) == 1
    other.execute("ROLLBACK")
    mine.save(transcript(FIRST, SECOND, FIRST))  # all that is missing is made up for
    assert [row.num_turns for row in SessionStore(path).rows()] == [3]
    assert len(warnings) == 1


def test_nowhere_to_write_is_said_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the place of a folder")
    warnings: list[str] = []
    mine = Recorder(tmp_path / "file" / "sessions.db", warnings.append)
    mine.save(transcript(FIRST))
    mine.save(transcript(FIRST, SECOND))
    assert any("not saved" in warning for warning in warnings)


def test_files_are_brought_to_the_present_version(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 0")
    SessionStore(path).create(transcript(FIRST))
    with sqlite3.connect(path) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (len(MIGRATIONS),)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("wal",)


def test_what_an_older_version_saved_is_listed_and_continued(path: Path) -> None:
    path.parent.mkdir()
    with sqlite3.connect(path) as db:
        for statement in ";".join(MIGRATIONS[:2]).split(";"):
            db.execute(statement)
        db.execute("INSERT INTO sessions VALUES (1, NULL, 'pocket', NULL, 1, 1, 0)")
        db.execute("INSERT INTO turns VALUES (1, 0, 'Why?', 'pocket', 'So.', '', 'stop', '')")
        db.execute("UPDATE turns SET token_ids = x''")
        db.execute("PRAGMA user_version = 2")
    store = SessionStore(path)
    assert [row.title for row in store.rows()] == ["Why?"]
    old = store.load(1)
    assert old.transcript.turns == [Turn("Why?", "pocket", "So.", "", FinishReason.STOP)]
    told = replace(old.transcript.turns[0], figures="2 tokens")
    store.save(old, Transcript("pocket", None, [told, FIRST]))
    assert store.load(1).transcript.turns == [told, FIRST]


def test_a_title_is_what_was_typed_and_stays(path: Path) -> None:
    store = SessionStore(path)
    question = Turn("a.txt:\n\nOnce upon a time\n\nSum it up.")
    session = store.create(Transcript("pocket", None, [question], "Sum it up."))
    store.save(session, transcript(question, FIRST))  # as a terminal goes on with it
    assert [row.title for row in store.rows()] == ["Sum it up."]
    assert store.load(session.id).transcript.title == "Sum it up."


@pytest.mark.parametrize("sought", ["GREET", "typed", "how are", "STILL", "über", "100%"])
def test_conversations_are_found_by_any_of_their_texts(path: Path, sought: str) -> None:
    store = SessionStore(path)
    last = replace(FIRST, question="Wherefore", answer="ÜBER 100%")
    store.create(Transcript("pocket", "No prompt", [FIRST, SECOND, last], "As typed"), "greeting")
    store.create(transcript(Turn("Another", "pocket", "100")))
    assert [row.name for row in store.rows(sought)] == ["greeting"]
    assert store.rows("prompt") == []
    assert len(store.rows("")) == 2


def test_setting_aside_takes_along_what_lies_beside_the_file(path: Path) -> None:
    path.parent.mkdir()
    for suffix in ("", "-wal", "-shm"):
        (path.parent / f"sessions.db{suffix}").write_text(suffix)
    aside = set_aside(path)
    assert {each.name.removeprefix(aside.name) for each in path.parent.iterdir()} == {
        "",
        "-wal",
        "-shm",
    }


def test_they_lie_in_the_data_folder(user_directories: Path) -> None:
    assert sessions_file().is_relative_to(user_directories)
