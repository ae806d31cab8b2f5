"""Keeps a conversation saved while it goes on, whatever becomes of the place it is saved in."""

import json
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from localllm.errors import DiskError, RequestError
from localllm.sessions import (
    ConflictError,
    DamagedError,
    SavedSession,
    SessionStore,
    set_aside,
)
from localllm.transcript import Transcript

# An answer that is being said is written this often.
FLUSH_S = 0.5


class Recorder:
    """Saves one conversation in a store, from its first question on.

    A conversation is never stopped by this: a damaged file is set aside and a new one begun; where
    none can be used, finished turns go to a file of JSON lines in its place. `warn` is told once.
    """

    def __init__(
        self,
        path: Path,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`path` is the store's; it is opened when there is something to save, or to find."""
        self._path, self._warn, self._clock = path, warn, clock
        self._store: SessionStore | None = None
        self._has_failed = self._has_given_up = False
        self._problem = ""
        self._session: SavedSession | None = None
        self._name: str | None = None
        self._flushed_s = 0.0
        # What the file in place of a store holds.
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
        """From here on it is a new conversation, or goes on with a saved one."""
        self._session, self._name = session, name
        self._written = Transcript("", None, ())

    def store(self) -> SessionStore:
        """Raises: DiskError, where there is no store to be had."""
        if self._store is None:
            try:
                self._store = SessionStore(self._path)
            except DamagedError as error:
                self._set_aside(error)
                self._store = SessionStore(self._path)
        return self._store

    def flush(self, transcript: Callable[[], Transcript]) -> None:
        """While an answer is said: save it, if that was not done a moment ago."""
        if self._has_failed or self._clock() - self._flushed_s < FLUSH_S:
            return
        self._save(transcript())

    def save(self, transcript: Transcript) -> None:
        """Save it now."""
        self._has_failed = False  # a disk may have room again
        self._save(transcript)
        if self._has_failed:
            self._write_lines(transcript)

    def rename(self, name: str, transcript: Transcript) -> None:
        """Give it a name. Raises: RequestError where it is taken; DiskError."""
        if self._session is None:
            if self.store().find(name) is not None:
                raise RequestError(f"there is a session {name!r:.100} already", param="session")
            self._name = name
        else:
            self._session = self.store().rename(self._session, name)
        self.save(transcript)

    def close(self) -> None:
        """Let go of the store."""
        if self._store is not None:
            self._store.close()
            self._store = None

    def _save(self, transcript: Transcript) -> None:
        if self._session is None and not transcript.turns:
            return
        try:
            self._put(transcript)
        except DamagedError as error:
            try:
                self._set_aside(error)
                self._put(transcript)
            except DiskError as worse:
                self._fail(worse)
        except DiskError as error:
            self._fail(error)
        self._flushed_s = self._clock()

    def _put(self, transcript: Transcript) -> None:
        store = self.store()
        if self._session is not None:
            try:
                self._session = store.save(self._session, transcript)
                return
            except ConflictError:
                self._warn(
                    f"session {self._session.name or self._session.id} went on elsewhere, or was "
                    "removed; this goes on as a new one"
                )
                self._session, self._name = None, None
        if self._name is not None and store.find(self._name) is not None:
            self._name = None  # taken in the meantime
        self._session = store.create(transcript, self._name)

    def _set_aside(self, error: DamagedError) -> None:
        if self._store is not None:
            self._store.close()
            self._store = None
        aside = set_aside(self._path)
        self._name, self._session = self.name, None
        self._warn(f"{error.message}; the file is kept as {aside}, and a new one is begun")

    def _fail(self, error: DiskError) -> None:
        self._has_failed = True
        self._problem = error.message

    def _write_lines(self, transcript: Transcript) -> None:
        """Append the turns that are not there yet, a line each; of one that changed both stay."""
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
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with path.open("a", encoding="ascii") as file:
                file.writelines(lines)
        except OSError as error:
            if not self._has_given_up:
                self._warn(f"this conversation is not saved: {error.strerror} ({path})")
            self._has_given_up = True
            return
        if is_first:
            self._warn(f"{self._problem}; this conversation is kept in {path}")
        self._lines_path, self._written = path, transcript
