"""Limits on a field of a message, beyond its type: `Annotated[str, AtMost(80)]`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AtMost:
    """The largest number of characters, bytes or items."""

    length: int


@dataclass(frozen=True, slots=True)
class Within:
    """The smallest and the largest value of a number."""

    low: float
    high: float


Limit = AtMost | Within
