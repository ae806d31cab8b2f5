"""Keeps a conversation saved while it goes on, whatever happens to the file it is saved in."""

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TypeVar

from localllm.chat.database import PATIENCE_S, DamagedError, set_aside
from localllm.chat.store import ConflictError, SavedSession, SessionStore
from localllm.chat.store_rows import SessionRow
from localllm.chat.transcript import Transcript
from localllm.errors import DiskError, RequestError
from localllm.files.private_files import make_private_folder, private_descriptor

T = TypeVar("T")

# Seconds between two saves of an answer in progress.
FLUSH_S = 0.5
# Seconds to wait for a file that was locked before, so that not every question waits long.
_IMPATIENCE_S = 0.05


class Recorder:
    """Saves one conversation in a store, from its first question on.

    Saving never stops a conversation: a damaged file is set aside and a new one is started; if no
    store can be used, finished turns go to a file of JSON lines instead. `warn` is told once.
    """

    def __init__(
        self,
        path: Path,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path` is the store's; it is opened once there is something to save or to find."""
        self._path, self._warn, self._clock = path, warn, clock
        self._store: SessionStore | None = None
        self._patience_s = PATIENCE_S
        self._has_failed = self._has_given_up = False
        self._problem = ""
        self.has_set_aside = False  # whether a damaged file was set aside
        self._begun_with: SavedSession | None = None
        self._session: SavedSession | None = None
        self._name: str | None = None
        self._flushed_s = 0.0
        # The file that is used instead of a store, and what it holds.
        self._lines_path: Path | None = None
        self._written = Transcript("", None, ())

    @property
    def session(self) -> SavedSession | None:
        """What is saved, None before the first question."""
        return self._session

    @property
    def name(self) -> str | None:
        """The conversation's name, if it has one."""
        return self._session.name if self._session is not None else self._name

    def begin(self, name: str | None = None, session: SavedSession | None = None) -> None:
        """Start a new conversation, or continue a saved one."""
        self._session, self._begun_with, self._name = session, session, name
        self._written = Transcript("", None, ())

    def store(self) -> SessionStore:
        """The store, which is opened if necessary. Raises: DiskError if that fails."""
        if self._store is None:
            try:
                self._store = SessionStore(self._path, self._patience_s)
            except DamagedError as error:
                self._set_aside(error)
                self._store = SessionStore(self._path, self._patience_s)
        return self._store

    def find(self, name: str) -> SavedSession | None:
        """See SessionStore; a damaged file is set aside. Raises: DiskError."""
        return self._read(lambda store: store.find(name))

    def get(self, name: str) -> SavedSession:
        """See SessionStore; a damaged file is set aside. Raises: RequestError, DiskError."""
        return self._read(lambda store: store.get(name))

    def latest(self) -> SavedSession | None:
        """See SessionStore; a damaged file is set aside. Raises: DiskError."""
        return self._read(lambda store: store.latest())

    def rows(self) -> list[SessionRow]:
        """See SessionStore; a damaged file is set aside. Raises: DiskError."""
        return self._read(lambda store: store.rows())

    def check_writable(self) -> None:
        """Raises: DiskError if nothing can be saved in a store."""
        self._read(lambda store: store.check_writable())

    def flush(self, transcript: Callable[[], Transcript]) -> None:
        """Save an answer in progress, unless that was done a moment ago."""
        if self._has_failed or self._clock() - self._flushed_s < FLUSH_S:
            return
        self._save(transcript())

    def save(self, transcript: Transcript) -> None:
        """Save the conversation now."""
        self._has_failed = False  # a disk may have room again
        self._save(transcript)
        if self._has_failed:
            self._write_lines(transcript)

    def take_back(self) -> None:
        """Restore what was saved when the conversation began, because its question was refused."""
        with suppress(DiskError, ConflictError):
            if self._session is None:
                return
            if self._begun_with is None:
                self.store().remove(self._session.id)
                self._session = None
            else:
                self._session = self.store().save(self._session, self._begun_with.transcript)

    def rename(self, name: str, transcript: Transcript) -> None:
        """Give the conversation a name. Raises: RequestError if it is taken; DiskError."""
        session = self._session
        if session is None:
            if self.find(name) is not None:
                raise RequestError(f"there is a session {name!r:.100} already", param="session")
            self._name = name
        else:
            try:
                self._session = self.store().rename(session, name)
            except DamagedError as error:
                self._set_aside(error)
                self._name = name
        self.save(transcript)

    def close(self) -> None:
        """Close the store."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _save(self, transcript: Transcript) -> None:
        if self._session is None and not transcript.turns:
            return
        try:
            try:
                self._put(transcript)
            except DamagedError as error:
                self._set_aside(error)
                self._put(transcript)
            self._set_patience(PATIENCE_S)
        except DiskError as error:
            self._has_failed, self._problem = True, error.message
            self._set_patience(_IMPATIENCE_S)
        self._flushed_s = self._clock()

    def _put(self, transcript: Transcript) -> None:
        store = self.store()
        if self._session is not None:
            try:
                self._session = store.save(self._session, transcript)
                return
            except ConflictError:
                self._warn(
                    f"session {self._session.name or self._session.id} was continued elsewhere or "
                    "removed; this conversation continues as a new session"
                )
                self._session, self._name = None, None
        if self._name is not None and store.find(self._name) is not None:
            self._name = None  # taken in the meantime
        self._session = store.create(transcript, self._name)

    def _read(self, read: Callable[[SessionStore], T]) -> T:
        self._set_patience(PATIENCE_S)  # the user waits for just this
        try:
            return read(self.store())
        except DamagedError as error:
            self._set_aside(error)
            return read(self.store())

    def _set_patience(self, patience_s: float) -> None:
        if self._store is not None and patience_s != self._patience_s:
            self._store.wait_for_locks(patience_s)
        self._patience_s = patience_s

    def _set_aside(self, error: DamagedError) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        aside = set_aside(self._path)
        self.has_set_aside = True
        self._name, self._session, self._begun_with = self.name, None, None
        self._warn(f"{error.message}; the file is kept as {aside}, and a new one is started")

    def _write_lines(self, transcript: Transcript) -> None:
        """Append the turns that are not there yet, a line each; a changed turn is added again."""
        is_first = self._lines_path is None
        path = self._lines_path or self._path.with_name(f"transcript-{time.time_ns()}.jsonl")
        known = self._written.turns
        lines = [
            json.dumps({"position": i, **asdict(replace(turn, token_ids=()))}) + "\n"
            for i, turn in enumerate(transcript.turns)
            if i >= len(known) or known[i] != turn
        ]
        if not lines:
            return
        try:
            _append(path, "".join(lines))
        except OSError as error:
            if not self._has_given_up:
                self._warn(
                    f"{self._problem}; this conversation is not saved: {error.strerror} ({path})"
                )
            self._has_given_up = True
            return
        if is_first:
            self._warn(f"{self._problem}; this conversation is kept in {path}")
        self._lines_path, self._written = path, transcript


def _append(path: Path, text: str) -> None:
    """Append a whole text to a file, or nothing. Raises: OSError."""
    make_private_folder(path.parent)
    with open(private_descriptor(path, os.O_WRONLY | os.O_APPEND), "ab") as file:
        end = file.tell()
        try:
            file.write(text.encode("ascii"))
            file.flush()
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise
