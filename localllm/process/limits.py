"""What a field of a message may hold, besides being of its type: `Annotated[str, AtMost(80)]`."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AtMost:
    """The most characters, bytes or items."""

    length: int


@dataclass(frozen=True, slots=True)
class Within:
    """The least and the greatest number."""

    low: float
    high: float


Limit = AtMost | Within
