"""Saved conversations: one SQLite file for all of them.

In WAL mode, so that a reader never waits for a writer, and committed data survives a kill -9. Rows
are written while an answer is in progress; see recorder.py for when.
"""

import difflib
import os
import sqlite3
import time
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from localllm.chat.store_rows import (
    SessionRow,
    UnsoundError,
    read_count,
    read_row,
    read_text,
    read_text_or_none,
    read_turn,
)
from localllm.chat.transcript import SUMMARY_REQUEST, Transcript, Turn
from localllm.errors import DiskError, RequestError
from localllm.files.private_files import make_private_folder, private_descriptor

# Seconds to wait for another process that has locked the file.
PATIENCE_S = 1.0
_LOCKED = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_PROTOCOL}
# SQLite's errors about the environment, such as locks and permissions; all others are the file's.
_OF_THE_PLACE = _LOCKED | {
    sqlite3.SQLITE_PERM,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_TOOBIG,
    sqlite3.SQLITE_AUTH,
}
# No version of ours is near this; a larger number is damage.
_MAX_VERSION = 1000
# Larger files are not checked when they are opened; damage shows when it is read.
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
    """The file is not a database, or is a broken one, or holds what was never written to it."""

    def __init__(self, reason: str, path: Path) -> None:
        super().__init__(
            f"the saved sessions are damaged: {reason}",
            where=str(path),
            hint="localllm chat, which keeps the file under another name and starts a new one",
        )


class ConflictError(Exception):
    """Another process has continued the session in the meantime."""


@dataclass(frozen=True, slots=True)
class SavedSession:
    """One saved conversation. `SessionStore.save` checks that `revision` has not changed."""

    id: int
    name: str | None
    transcript: Transcript
    revision: int


class SessionStore:
    """The saved conversations in one file.

    Every method raises DamagedError for a broken file, and DiskError for one that cannot be read or
    written: locked for longer than a second, read-only, a full disk.
    """

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        """Open or create the file; waits up to `patience_s` for one that is locked.

        Raises: also DiskError for a file that a newer version has written.
        """
        self.path = path
        with self._told():
            # Conversations are private: no other user may read them. SQLite gives the files that it
            # keeps beside this one the same mode.
            make_private_folder(path.parent)
            os.close(private_descriptor(path, os.O_RDWR))
            self._db = sqlite3.connect(path, timeout=patience_s, isolation_level=None)
        try:
            with self._told():
                self._prepare()
        except DiskError:
            self._db.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def wait_for_locks(self, patience_s: float) -> None:
        """Set how long to wait for a locked file."""
        with self._told():
            self._db.execute(f"PRAGMA busy_timeout = {int(1000 * patience_s)}")

    def check_writable(self) -> None:
        """Raises: DiskError if nothing can be saved now."""
        with self._transaction():
            pass

    def create(self, transcript: Transcript, name: str | None = None) -> SavedSession:
        """Save a new conversation. Raises: RequestError if the name is taken."""
        now = time.time()
        with self._transaction():
            self._refuse_taken(name)
            cursor = self._db.execute(
                "INSERT INTO sessions (name, model, system, created_s, updated_s, revision) "
                "VALUES (?, ?, ?, ?, ?, 0)",
                (name, _clean(transcript.model), _clean(transcript.system), now, now),
            )
            assert cursor.lastrowid is not None
            if self._db.execute(
                "SELECT 1 FROM turns WHERE session_id = ?", (cursor.lastrowid,)
            ).fetchone():
                raise UnsoundError("there are turns without a conversation")
            self._put_turns(cursor.lastrowid, transcript.turns, 0)
        return SavedSession(cursor.lastrowid, name, transcript, 0)

    def save(self, session: SavedSession, transcript: Transcript) -> SavedSession:
        """Bring a saved conversation up to date; only turns that changed are written.

        Raises: ConflictError if the saved conversation is no longer as `session` says.
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
                    _clean(transcript.model),
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
        """Give a conversation a name. Raises: RequestError if it is taken."""
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
            return [read_row(row) for row in found]

    def latest(self) -> SavedSession | None:
        """The conversation that was continued last."""
        rows = self.rows()
        return self.load(rows[0].id) if rows else None

    def find(self, name: str) -> SavedSession | None:
        """The conversation with this name, or else this number."""
        with self._told():
            row = self._db.execute(
                "SELECT id FROM sessions WHERE name = ?", (_clean(name),)
            ).fetchone()
            if row is None and name.isascii() and name.isdigit() and len(name) < 19:
                row = self._db.execute(
                    "SELECT id FROM sessions WHERE id = ?", (int(name),)
                ).fetchone()
        return None if row is None else self.load(row[0])

    def get(self, name: str) -> SavedSession:
        """As `find`. Raises: RequestError, with the nearest names, if there is none."""
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
        with self._transaction("DEFERRED"):
            row = self._db.execute(
                "SELECT name, model, system, revision FROM sessions WHERE id = ?", (session_id,)
            ).fetchone()
            found = self._db.execute(
                "SELECT position, question, model, answer, thinking, finish_reason, token_ids "
                "FROM turns WHERE session_id = ? ORDER BY position",
                (session_id,),
            ).fetchall()
            turns = [read_turn(turn, position) for position, turn in enumerate(found)]
            if row is not None:
                name, model, system, revision = row
                transcript = Transcript(read_text(model), read_text_or_none(system), turns)
                return SavedSession(
                    session_id, read_text_or_none(name), transcript, read_count(revision)
                )
        raise RequestError(f"there is no session {session_id}", param="session")

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        self._db.execute("PRAGMA foreign_keys = ON")
        is_small = self.path.stat().st_size <= _CHECKED_BYTES
        if is_small:
            (verdict,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise DamagedError(f"{verdict:.200}", self.path)
        # A process that only reads must not wait for one that writes.
        if self._version() != len(MIGRATIONS):
            self._migrate()
        if is_small:
            self.rows()  # finds damage in any listed row, whichever is asked for later

    def _migrate(self) -> None:
        with self._transaction():
            version = self._version()
            for script in MIGRATIONS[version:]:
                for statement in script.split(";"):
                    self._db.execute(statement)
            self._db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _version(self) -> int:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= _MAX_VERSION:
            raise DamagedError(f"their version is {version}", self.path)
        if version > len(MIGRATIONS):
            raise DiskError(
                "the saved sessions are from a newer localllm",
                where=str(self.path),
                hint="update localllm; the file has not been changed",
            )
        return int(version)

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
                    _clean(turn.model),
                    _clean(turn.answer),
                    _clean(turn.thinking),
                    turn.finish_reason,
                    array("i", turn.token_ids).tobytes(),
                )
                for position, turn in enumerate(turns, first)
            ],
        )

    @contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        with self._told():
            self._db.execute(f"BEGIN {kind}")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    @contextmanager
    def _told(self) -> Iterator[None]:
        """Turns errors from SQLite, and from the checks of rows, into errors of ours."""
        try:
            yield
        except sqlite3.ProgrammingError:
            raise  # a bug of ours, not damage to the file
        except sqlite3.DatabaseError as error:
            # The low byte; errors that Python finds itself, such as text that is not UTF-8, have no
            # code.
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code not in _OF_THE_PLACE:
                raise DamagedError(f"{error!s:.200}", self.path) from error
            if code in _LOCKED:
                raise DiskError(
                    "the saved sessions are locked by another program",
                    where=str(self.path),
                    hint="try again when it is done; chat --no-save works without them",
                ) from error
            raise DiskError(
                f"the saved sessions cannot be used: {error}",
                where=str(self.path),
                hint="check the disk's space and the file's permissions",
            ) from error
        except UnicodeDecodeError as error:  # SQLite's own message quotes what is damaged
            raise DamagedError("the schema is not UTF-8", self.path) from error
        except UnsoundError as error:
            raise DamagedError(str(error), self.path) from error
        except OSError as error:
            raise DiskError(
                f"the saved sessions cannot be used: {error.strerror}",
                where=str(self.path),
                hint="fix or remove what is there; chat --no-save works without it",
            ) from error


def set_aside(path: Path) -> Path:
    """Rename a damaged file, and those that SQLite keeps beside it; returns the new name.

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


def _clean(text: str | None) -> str | None:
    """Replace lone surrogates, which text from a terminal can hold and a file cannot."""
    return None if text is None else text.encode("utf-8", errors="replace").decode("utf-8")
