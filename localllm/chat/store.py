"""Saved conversations. Rows are written while an answer is in progress: see recorder.py."""

import difflib
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.chat.database import PATIENCE_S, Database
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


class ConflictError(Exception):
    """Another process has continued the session in the meantime."""


class NoSessionError(RequestError):
    """There is no session with this number."""


@dataclass(frozen=True, slots=True)
class SavedSession:
    """One saved conversation. `SessionStore.save` checks that `revision` has not changed."""

    id: int
    name: str | None
    transcript: Transcript
    revision: int


class SessionStore(Database):
    """The saved conversations in one file."""

    def __init__(self, path: Path, patience_s: float = PATIENCE_S) -> None:
        super().__init__(path, patience_s)
        self.db.create_function("holds", 2, _holds, deterministic=True)
        try:
            if self.is_small:
                self.rows()  # finds damage in any listed row, whichever is asked for later
        except DiskError:
            self.db.close()
            raise

    def wait_for_locks(self, patience_s: float) -> None:
        """Set how long to wait for a locked file."""
        with self.told():
            self.db.execute(f"PRAGMA busy_timeout = {int(1000 * patience_s)}")

    def check_writable(self) -> None:
        """Raises: DiskError if nothing can be saved now."""
        with self.transaction():
            pass

    def create(self, transcript: Transcript, name: str | None = None) -> SavedSession:
        """Save a new conversation. Raises: RequestError if the name is taken."""
        now = time.time()
        with self.transaction():
            self._refuse_taken(name)
            cursor = self.db.execute(
                "INSERT INTO sessions (name, model, system, title, created_s, updated_s, revision) "
                "VALUES (?, ?, ?, ?, ?, ?, 0)",
                (
                    name,
                    _clean(transcript.model),
                    _clean(transcript.system),
                    _clean(transcript.title),
                    now,
                    now,
                ),
            )
            assert cursor.lastrowid is not None
            if self.db.execute(
                "SELECT 1 FROM turns WHERE session_id = ?", (cursor.lastrowid,)
            ).fetchone():
                raise UnsoundError("there are turns without a conversation")
            self._put_turns(cursor.lastrowid, transcript.turns, 0)
        return SavedSession(cursor.lastrowid, name, transcript, 0)

    def save(self, session: SavedSession, transcript: Transcript) -> SavedSession:
        """Bring a saved conversation up to date; only turns that changed are written. It keeps its
        title if `transcript` has none.

        Raises: ConflictError if the saved conversation is no longer as `session` says.
        """
        old, new = session.transcript.turns, transcript.turns
        same = 0
        while same < min(len(old), len(new)) and old[same] == new[same]:
            same += 1
        with self.transaction():
            cursor = self.db.execute(
                "UPDATE sessions SET model = ?, system = ?, "
                "title = coalesce(nullif(?, ''), title), updated_s = ?, "
                "revision = revision + 1 WHERE id = ? AND revision = ?",
                (
                    _clean(transcript.model),
                    _clean(transcript.system),
                    _clean(transcript.title),
                    time.time(),
                    session.id,
                    session.revision,
                ),
            )
            if cursor.rowcount == 0:
                raise ConflictError
            self.db.execute(
                "DELETE FROM turns WHERE session_id = ? AND position >= ?", (session.id, len(new))
            )
            self._put_turns(session.id, new[same:], same)
        return SavedSession(session.id, session.name, transcript, session.revision + 1)

    def rename(self, session: SavedSession, name: str | None) -> SavedSession:
        """Give a conversation a name; None takes it away. Raises: RequestError if it is taken."""
        if name != session.name:
            with self.transaction():
                self._refuse_taken(name)
                self.db.execute("UPDATE sessions SET name = ? WHERE id = ?", (name, session.id))
        return SavedSession(session.id, name, session.transcript, session.revision)

    def remove(self, session_id: int) -> None:
        """Delete a conversation for good."""
        with self.transaction():
            self.db.execute("DELETE FROM sessions WHERE id = ?", (session_id,))

    def rows(self, containing: str = "") -> list[SessionRow]:
        """All conversations, the newest first; or only those with a text in their name, title,
        questions or answers, whatever its case.
        """
        sought = containing.casefold()
        with self.told():
            found = self.db.execute(
                "SELECT id, name, model, created_s, updated_s, title, "
                # The user's own words, if there are any.
                "(SELECT question FROM turns WHERE session_id = id "
                "ORDER BY question = :summary, position LIMIT 1), "
                "(SELECT count(*) FROM turns WHERE session_id = id) "
                "FROM sessions WHERE :sought = '' OR holds(name, :sought) OR holds(title, :sought) "
                "OR EXISTS (SELECT 1 FROM turns WHERE session_id = id "
                "AND (holds(question, :sought) OR holds(answer, :sought))) "
                "ORDER BY updated_s DESC, id DESC",
                {"summary": SUMMARY_REQUEST, "sought": sought},
            ).fetchall()
            return [read_row(row) for row in found]

    def latest(self) -> SavedSession | None:
        """The conversation that was continued last."""
        rows = self.rows()
        return self.load(rows[0].id) if rows else None

    def find(self, name: str) -> SavedSession | None:
        """The conversation with this name, or else this number."""
        with self.told():
            row = self.db.execute(
                "SELECT id FROM sessions WHERE name = ?", (_clean(name),)
            ).fetchone()
            if row is None and name.isascii() and name.isdigit() and len(name) < 19:
                row = self.db.execute(
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
        """A conversation with its turns. Raises: NoSessionError."""
        with self.transaction("DEFERRED"):
            row = self.db.execute(
                "SELECT name, model, system, revision, title FROM sessions WHERE id = ?",
                (session_id,),
            ).fetchone()
            found = self.db.execute(
                "SELECT position, question, model, answer, thinking, finish_reason, token_ids, "
                "figures FROM turns WHERE session_id = ? ORDER BY position",
                (session_id,),
            ).fetchall()
            turns = [read_turn(turn, position) for position, turn in enumerate(found)]
            if row is not None:
                name, model, system, revision, title = row
                transcript = Transcript(
                    read_text(model), read_text_or_none(system), turns, read_text(title)
                )
                return SavedSession(
                    session_id, read_text_or_none(name), transcript, read_count(revision)
                )
        raise NoSessionError(f"there is no session {session_id}", param="session")

    def _refuse_taken(self, name: str | None) -> None:
        taken = (
            name is not None
            and self.db.execute("SELECT 1 FROM sessions WHERE name = ?", (name,)).fetchone()
        )
        if taken:
            raise RequestError(
                f"there is a session {name!r:.100} already",
                param="session",
                hint="another name, or /load it",
            )

    def _put_turns(self, session_id: int, turns: Sequence[Turn], first: int) -> None:
        self.db.executemany(
            "INSERT OR REPLACE INTO turns (session_id, position, question, model, answer, "
            "thinking, finish_reason, token_ids, figures) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
                    _clean(turn.figures),
                )
                for position, turn in enumerate(turns, first)
            ],
        )


def check_name(name: str) -> None:
    """Raises: RequestError for an invalid session name."""
    if name.isdigit():
        raise RequestError(
            f"{name:.40} is not a valid session name: plain numbers are session ids",
            param="session",
            hint="a name with a letter in it",
        )
    if not name.strip() or len(name) > 60 or not name.isprintable() or name.startswith("-"):
        raise RequestError(
            f"{name!r:.80} is not a valid session name",
            param="session",
            hint="up to 60 letters, digits and symbols, not digits alone",
        )


def _holds(text: object, sought: str) -> bool:
    """Whether a column's text contains `sought`, which is casefolded."""
    return isinstance(text, str) and sought in text.casefold()


def _clean(text: str | None) -> str | None:
    """Replace lone surrogates, which text from a terminal can hold and a file cannot."""
    return None if text is None else text.encode("utf-8", errors="replace").decode("utf-8")
