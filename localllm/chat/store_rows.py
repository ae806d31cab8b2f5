"""Reads rows of saved conversations, and checks them: SQLite holds any type in any column."""

from array import array
from dataclasses import dataclass
from typing import Any

from localllm.chat.transcript import Turn, make_title
from localllm.schedule.request import FinishReason

# The largest number that is accepted; SQLite can still count on from it.
_MAX_COUNT = 1 << 53


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


class UnsoundError(Exception):
    """A row holds a value that was never written."""


def read_row(row: tuple[Any, ...]) -> SessionRow:
    """A row of the list of conversations. Raises: UnsoundError."""
    session_id, name, model, created_s, updated_s, title, question, num_turns = row
    return SessionRow(
        id=read_count(session_id),
        name=read_text_or_none(name),
        title=make_title(read_text(title) or read_text_or_none(question) or ""),
        model=read_text(model),
        num_turns=read_count(num_turns),
        created_s=_time(created_s),
        updated_s=_time(updated_s),
    )


def read_turn(row: tuple[Any, ...], expected: int) -> Turn:
    """The turn at the place `expected`. Raises: UnsoundError."""
    position, question, model, answer, thinking, finish_reason, token_ids, figures = row
    if position != expected:
        raise UnsoundError(f"turn {expected} is missing")
    reason = read_text_or_none(finish_reason)
    if reason not in (None, *FinishReason):
        raise UnsoundError(f"an answer has the finish reason {reason!r:.40}")
    return Turn(
        read_text(question),
        read_text(model),
        read_text(answer),
        read_text(thinking),
        None if reason is None else FinishReason(reason),
        _token_ids(token_ids),
        read_text(figures),
    )


def read_text(value: object) -> str:
    """Raises: UnsoundError."""
    if not isinstance(value, str):
        raise UnsoundError(f"{type(value).__name__} instead of a text")
    return value


def read_text_or_none(value: object) -> str | None:
    """Raises: UnsoundError."""
    return None if value is None else read_text(value)


def read_count(value: object) -> int:
    """Raises: UnsoundError."""
    if not isinstance(value, int) or not 0 <= value <= _MAX_COUNT:
        raise UnsoundError(f"{value!r:.40} instead of a count")
    return value


def _time(value: object) -> float:
    if not isinstance(value, (int, float)) or not 0 <= value <= _MAX_COUNT:
        raise UnsoundError(f"{value!r:.40} instead of a time")
    return float(value)


def _token_ids(value: object) -> tuple[int, ...]:
    ids = array("i")
    if not isinstance(value, bytes) or len(value) % ids.itemsize:
        raise UnsoundError("an answer's token ids are truncated")
    ids.frombytes(value)
    if min(ids, default=0) < -1:  # -1: a chunk from a server, which counts as a token without an id
        raise UnsoundError("a negative token id")
    return tuple(ids)
