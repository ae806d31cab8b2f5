"""The SQLite file that holds what localllm saves: conversations, and answers for later requests.

In WAL mode, so that a reader never waits for a writer, and committed data survives a kill -9.
"""

import os
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from localllm.chat.store_rows import UnsoundError
from localllm.errors import DiskError
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
    """
    CREATE TABLE responses (
        id TEXT PRIMARY KEY,
        owner BLOB NOT NULL,
        previous TEXT,
        created_s REAL NOT NULL,
        used_s REAL NOT NULL,
        num_bytes INTEGER NOT NULL,
        input TEXT NOT NULL,
        response TEXT NOT NULL
    ) WITHOUT ROWID;
    CREATE INDEX responses_by_time ON responses (used_s)
    """,
    """
    ALTER TABLE sessions ADD COLUMN title TEXT NOT NULL DEFAULT '';
    ALTER TABLE turns ADD COLUMN figures TEXT NOT NULL DEFAULT ''
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


class Database:
    """The file; `db` is its connection, for one thread.

    Every method raises DamagedError for a broken file, and DiskError for one that cannot be read or
    written: locked for longer than a second, read-only, a full disk.
    """

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        """Open or create the file; waits up to `patience_s` for one that is locked.

        Raises: also DiskError for a file that a newer version has written.
        """
        self.path = path
        with self.told():
            # Conversations are private: no other user may read them. SQLite gives the files that it
            # keeps beside this one the same mode.
            make_private_folder(path.parent)
            os.close(private_descriptor(path, os.O_RDWR))
            self.db = sqlite3.connect(path, timeout=patience_s, isolation_level=None)
        try:
            with self.told():
                self._prepare()
        except DiskError:
            self.db.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self.db.close()

    @property
    def is_small(self) -> bool:
        """Whether the whole file is checked when it is opened."""
        return self.path.stat().st_size <= _CHECKED_BYTES

    def _prepare(self) -> None:
        self.db.execute("PRAGMA journal_mode = WAL")
        self.db.execute("PRAGMA synchronous = NORMAL")
        self.db.execute("PRAGMA foreign_keys = ON")
        if self.is_small:
            (verdict,) = self.db.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise DamagedError(f"{verdict:.200}", self.path)
        # A process that only reads must not wait for one that writes.
        if self._version() != len(MIGRATIONS):
            self._migrate()

    def _migrate(self) -> None:
        with self.transaction():
            version = self._version()
            for script in MIGRATIONS[version:]:
                for statement in script.split(";"):
                    self.db.execute(statement)
            self.db.execute(f"PRAGMA user_version = {len(MIGRATIONS)}")

    def _version(self) -> int:
        (version,) = self.db.execute("PRAGMA user_version").fetchone()
        if not 0 <= version <= _MAX_VERSION:
            raise DamagedError(f"their version is {version}", self.path)
        if version > len(MIGRATIONS):
            raise DiskError(
                "the saved sessions are from a newer localllm",
                where=str(self.path),
                hint="update localllm; the file has not been changed",
            )
        return int(version)

    @contextmanager
    def transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        """All that is done within it, or nothing."""
        with self.told():
            self.db.execute(f"BEGIN {kind}")
            try:
                yield
                self.db.execute("COMMIT")
            finally:
                if self.db.in_transaction:
                    self.db.execute("ROLLBACK")

    @contextmanager
    def told(self) -> Iterator[None]:
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
