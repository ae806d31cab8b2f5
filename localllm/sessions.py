"""Saved conversations: one SQLite file for all of them.

In WAL mode, so that a reader never waits for a writer, and what was committed survives a kill -9.
Rows are written while an answer is said; see recorder.py for when.
"""

import difflib
import sqlite3
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localllm.engine.request import FinishReason
from localllm.errors import DiskError, RequestError
from localllm.transcript import SUMMARY_REQUEST, Transcript, Turn, make_title

# Seconds to wait for another process that writes.
_PATIENCE_S = 5.0
# Larger files are not read through at the start; damage shows when it is met.
_CHECKED_BYTES = 64 << 20
# Each brings the database from one version (its index) to the next.
MIGRATIONS = (
    """
    CREATE TABLE sessions (
        id INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT UNIQUE,
        model TEXT NOT NULL,
        system TEXT,
        created_s REAL NOT NULL,
        updated_s REAL NOT NULL,
        revision INTEGER NOT NULL
    );
    CREATE TABLE turns (
        session_id INTEGER NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
        position INTEGER NOT NULL,
        question TEXT NOT NULL,
        model TEXT NOT NULL,
        answer TEXT NOT NULL,
        thinking TEXT NOT NULL,
        finish_reason TEXT,
        token_ids BLOB NOT NULL,
        PRIMARY KEY (session_id, position)
    ) WITHOUT ROWID;
    CREATE INDEX sessions_by_time ON sessions (updated_s);
    """,
)


class DamagedError(DiskError):
    """The file is no database, or a broken one."""


class ConflictError(Exception):
    """Another process has gone on with the session in the meantime."""


@dataclass(frozen=True, slots=True)
class SessionRow:
    """One saved conversation without its turns; times in seconds from the epoch."""

    id: int
    name: str | None
    title: str
    model: str
    num_turns: int
    created_s: float
    updated_s: float


@dataclass(frozen=True, slots=True)
class SavedSession:
    """One saved conversation. `revision` is what `SessionStore.save` wants to see unchanged."""

    id: int
    name: str | None
    transcript: Transcript
    revision: int


class SessionStore:
    """The saved conversations in one file.

    Every method raises DamagedError for a broken file, and DiskError for one that cannot be read or
    written: locked for longer than five seconds, read-only, a full disk.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, or begin it.

        Raises: also DiskError for one that a newer version has written.
        """
        self.path = path
        with self._told():
            # Conversations are private: nobody else reads them.
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, timeout=_PATIENCE_S, isolation_level=None)
        try:
            with self._told():
                self._prepare()
        except DiskError:
            self._db.close()
            raise

    def close(self) -> None:
        """Let go of the file."""
        self._db.close()

    def create(self, transcript: Transcript, name: str | None = None) -> SavedSession:
        """Save a new conversation. Raises: RequestError where the name is taken."""
        now = time.time()
        with self._transaction():
            self._refuse_taken(name)
            cursor = self._db.execute(
                "INSERT INTO sessions (name, model, system, created_s, updated_s, revision) "
                "VALUES (?, ?, ?, ?, ?, 0)",
                (name, transcript.model, _clean(transcript.system), now, now),
            )
            assert cursor.lastrowid is not None
            self._put_turns(cursor.lastrowid, transcript.turns, 0)
        return SavedSession(cursor.lastrowid, name, transcript, 0)

    def save(self, session: SavedSession, transcript: Transcript) -> SavedSession:
        """Bring a saved conversation up to date; only turns that changed are written.

        Raises: ConflictError where it is no longer as `session` says.
        """
        old, new = session.transcript.turns, transcript.turns
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        with self._transaction():
            cursor = self._db.execute(
                "UPDATE sessions SET model = ?, system = ?, updated_s = ?, revision = revision + 1 "
                "WHERE id = ? AND revision = ?",
                (
                    transcript.model,
                    _clean(transcript.system),
                    time.time(),
                    session.id,
                    session.revision,
                ),
            )
            if cursor.rowcount == 0:
                raise ConflictError
            self._db.execute(
                "DELETE FROM turns WHERE session_id = ? AND position >= ?", (session.id, len(new))
            )
            self._put_turns(session.id, new[same:], same)
        return SavedSession(session.id, session.name, transcript, session.revision + 1)

    def rename(self, session: SavedSession, name: str) -> SavedSession:
        """Give a conversation a name. Raises: RequestError where it is taken."""
        if name != session.name:
            with self._transaction():
                self._refuse_taken(name)
                self._db.execute("UPDATE sessions SET name = ? WHERE id = ?", (name, session.id))
        return SavedSession(session.id, name, session.transcript, session.revision)

    def remove(self, session_id: int) -> None:
        """Delete a conversation for good."""
        with self._transaction():
            self._db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

    def rows(self) -> list[SessionRow]:
        """All conversations, the newest first."""
        with self._told():
            found = self._db.execute(
                "SELECT id, name, model, created_s, updated_s, "
                # The user's own words, if there are any.
                "(SELECT question FROM turns WHERE session_id = id "
                "ORDER BY question = ?, position LIMIT 1), "
                "(SELECT count(*) FROM turns WHERE session_id = id) "
                "FROM sessions ORDER BY updated_s DESC, id DESC",
                (SUMMARY_REQUEST,),
            ).fetchall()
        return [
            SessionRow(
                id=row[0],
                name=row[1],
                title=make_title(row[5] or ""),
                model=row[2],
                num_turns=row[6],
                created_s=row[3],
                updated_s=row[4],
            )
            for row in found
        ]

    def latest(self) -> SavedSession | None:
        """The conversation that was gone on with last."""
        rows = self.rows()
        return self.load(rows[0].id) if rows else None

    def find(self, name: str) -> SavedSession | None:
        """The conversation with this name, or else this number."""
        with self._told():
            row = self._db.execute("SELECT id FROM sessions WHERE name = ?", (name,)).fetchone()
            if row is None and name.isascii() and name.isdigit() and len(name) < 19:
                row = self._db.execute(
                    "SELECT id FROM sessions WHERE id = ?", (int(name),)
                ).fetchone()
        return None if row is None else self.load(row[0])

    def get(self, name: str) -> SavedSession:
        """As `find`. Raises: RequestError, with the nearest names, where there is none."""
        session = self.find(name)
        if session is None:
            names = [row.name for row in self.rows() if row.name]
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4)
            raise RequestError(
                f"there is no session {name!r:.100}",
                param="session",
                where=f"nearest: {', '.join(near)}" if near else "",
                hint="localllm sessions list",
            )
        return session

    def load(self, session_id: int) -> SavedSession:
        """A conversation with its turns."""
        with self._told():
            self._db.execute("BEGIN")
            try:
                row = self._db.execute(
                    "SELECT name, model, system, revision FROM sessions WHERE id = ?", (session_id,)
                ).fetchone()
                turns = self._db.execute(
                    "SELECT question, model, answer, thinking, finish_reason, token_ids "
                    "FROM turns WHERE session_id = ? ORDER BY position",
                    (session_id,),
                ).fetchall()
            finally:
                self._db.execute("COMMIT")
        if row is None:
            raise RequestError(f"there is no session {session_id}", param="session")
        name, model, system, revision = row
        transcript = Transcript(model, system, [_read_turn(turn) for turn in turns])
        return SavedSession(session_id, name, transcript, revision)

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        if self.path.stat().st_size <= _CHECKED_BYTES:
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise DamagedError(f"the saved sessions are damaged: {verdict}")
        with self._transaction():
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            if version > len(MIGRATIONS):
                raise DiskError(
                    "the saved sessions are of a newer localllm",
                    where=str(self.path),
                    hint="update localllm; nothing there was changed",
                )
            for script in MIGRATIONS[version:]:
                for statement in script.split(";"):
                    self._db.execute(statement)
            if version < len(MIGRATIONS):
                self._db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _refuse_taken(self, name: str | None) -> None:
        taken = (
            name is not None
            and self._db.execute("SELECT 1 FROM sessions WHERE name = ?", (name,)).fetchone()
        )
        if taken:
            raise RequestError(
                f"there is a session {name!r:.100} already",
                param="session",
                hint="another name, or /load it",
            )

    def _put_turns(self, session_id: int, turns: Sequence[Turn], first: int) -> None:
        self._db.executemany(
            "INSERT OR REPLACE INTO turns (session_id, position, question, model, answer, "
            "thinking, finish_reason, token_ids) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (
                    session_id,
                    position,
                    _clean(turn.question),
                    turn.model,
                    _clean(turn.answer),
                    _clean(turn.thinking),
                    turn.finish_reason,
                    array("i", turn.token_ids).tobytes(),
                )
                for position, turn in enumerate(turns, first)
            ],
        )

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._told():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """SQLite's errors as ours."""
        try:
            yield
        except sqlite3.OperationalError as error:
            raise DiskError(
                f"the saved sessions cannot be used: {error}",
                where=str(self.path),
                hint="check the disk's space and the file's permissions",
            ) from error
        except sqlite3.DatabaseError as error:
            raise DamagedError(
                f"the saved sessions are damaged: {error}", where=str(self.path)
            ) from error
        except OSError as error:
            raise DiskError(
                f"the saved sessions cannot be used: {error.strerror}", where=str(self.path)
            ) from error


def set_aside(path: Path) -> Path:
    """Give a damaged file, and what SQLite keeps beside it, another name, which is returned.

    Raises: DiskError.
    """
    aside = path.with_name(f"{path.stem}.damaged-{time.time_ns()}{path.suffix}")
    try:
        for suffix in ("-wal", "-shm", ""):
            part = path.with_name(path.name + suffix)
            if part.exists():
                part.rename(aside.with_name(aside.name + suffix))
    except OSError as error:
        raise DiskError(
            f"the damaged sessions cannot be set aside: {error.strerror}", where=str(path)
        ) from error
    return aside


def _read_turn(row: tuple[str, str, str, str, str | None, bytes]) -> Turn:
    question, model, answer, thinking, finish_reason, token_ids = row
    ids = array("i")
    ids.frombytes(token_ids)
    return Turn(
        question,
        model,
        answer,
        thinking,
        None if finish_reason is None else FinishReason(finish_reason),
        tuple(ids),
    )


def _clean(text: str | None) -> str | None:
    """Text from a terminal can hold lone surrogates, which no file takes."""
    return None if text is None else text.encode("utf-8", errors="replace").decode("utf-8")
