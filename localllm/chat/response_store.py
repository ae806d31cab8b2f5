"""Answers that later requests go on from, or ask for again, by their names: the Responses API.

Each belongs to the key that it was made with. A limit on their size and one on their age keep what
nobody comes back to from staying for ever.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from localllm.chat.database import PATIENCE_S, Database
from localllm.chat.store_rows import UnsoundError, read_text, read_text_or_none
from localllm.errors import ContextLengthError

T = TypeVar("T")
# Requests that a conversation can have.
_MOST_LINKS = 2048


@dataclass(frozen=True, slots=True)
class Quota:
    """What may be kept: bytes in all, and seconds since it was last used."""

    num_bytes: int
    age_s: float


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """An answer, as it was sent, with the items that it answers."""

    id: str
    previous: str | None
    input: list[dict[str, Any]]
    response: dict[str, Any]


class ResponseStore(Database):
    """The kept answers in one file. `owner` is what keeps those of one key from others."""

    def __init__(self, path: Path, quota: Quota, patience_s: float = PATIENCE_S) -> None:
        super().__init__(path, patience_s)
        self._quota = quota

    def put(self, owner: bytes, stored: StoredResponse) -> None:
        """Keep an answer, and drop what is too old or too much."""
        now = time.time()
        asked, response = json.dumps(stored.input), json.dumps(stored.response)
        with self.transaction():
            self.db.execute(
                "INSERT INTO responses (id, owner, previous, created_s, used_s, num_bytes, input, "
                "response) VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    stored.id,
                    owner,
                    stored.previous,
                    now,
                    now,
                    len(asked) + len(response),
                    asked,
                    response,
                ),
            )
            self._drop(now)

    def get(self, owner: bytes, name: str) -> StoredResponse | None:
        """The answer with this name."""
        with self.told():
            row = self.db.execute(
                "SELECT previous, input, response FROM responses WHERE id = ? AND owner = ?",
                (name, owner),
            ).fetchone()
            if row is None:
                return None
            previous, asked, response = row
            return StoredResponse(
                name, read_text_or_none(previous), _json(asked, list), _json(response, dict)
            )

    def conversation(self, owner: bytes, name: str, most_bytes: int) -> list[StoredResponse] | None:
        """The answer with this name and those before it, the first one first, which all count as
        used now; None if one of them is gone.

        Raises: ContextLengthError if they have over `most_bytes`.
        """
        found: list[StoredResponse] = []
        next_name: str | None = name
        total = 0
        while next_name is not None:
            total += self._size(owner, next_name)
            if total > most_bytes:
                raise ContextLengthError(
                    f"the conversation has over {most_bytes:,} bytes",
                    param="previous_response_id",
                    hint="begin anew, with a summary of it",
                )
            stored = self.get(owner, next_name)
            if stored is None or len(found) == _MOST_LINKS:
                return None
            found.append(stored)
            next_name = stored.previous
        with self.transaction():
            self.db.executemany(
                "UPDATE responses SET used_s = ? WHERE id = ?",
                [(time.time(), each.id) for each in found],
            )
        return found[::-1]

    def _size(self, owner: bytes, name: str) -> int:
        with self.told():
            row = self.db.execute(
                "SELECT num_bytes FROM responses WHERE id = ? AND owner = ?", (name, owner)
            ).fetchone()
        return 0 if row is None else int(row[0])

    def remove(self, owner: bytes, name: str) -> bool:
        """Delete an answer for good; whether there was one."""
        with self.transaction():
            cursor = self.db.execute(
                "DELETE FROM responses WHERE id = ? AND owner = ?", (name, owner)
            )
        return cursor.rowcount > 0

    def _drop(self, now: float) -> None:
        """Drop what is too old, and then the oldest of whoever has most, so that nobody pushes out
        the answers of others who have less.
        """
        self.db.execute("DELETE FROM responses WHERE used_s < ?", (now - self._quota.age_s,))
        kept: dict[bytes, int] = dict(
            self.db.execute("SELECT owner, SUM(num_bytes) FROM responses GROUP BY owner")
        )
        while sum(kept.values()) > self._quota.num_bytes:
            largest = max(kept, key=kept.__getitem__)
            name, num_bytes = self.db.execute(
                "SELECT id, num_bytes FROM responses WHERE owner = ? "
                # Of those used at once, the newest: of a conversation that is cut, its beginning
                # stays.
                "ORDER BY used_s, created_s DESC LIMIT 1",
                (largest,),
            ).fetchone()
            self.db.execute("DELETE FROM responses WHERE id = ?", (name,))
            kept[largest] -= num_bytes


def _json(text: Any, kind: type[T]) -> T:
    """Raises: UnsoundError."""
    try:
        found = json.loads(read_text(text))
    except (ValueError, RecursionError) as error:
        raise UnsoundError("a kept answer is not JSON") from error
    if not isinstance(found, kind):
        raise UnsoundError(f"a kept answer is not a {kind.__name__}")
    return found
