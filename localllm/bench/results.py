"""The results of a test: numbers with their spread, and one line that says what they mean."""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.cost.rates import Rates


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, minimum and maximum of repeated measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """The spread of `values`, of which there is at least one."""
        return cls(statistics.median(values), min(values), max(values))


def of_pairs(
    pairs: Sequence[tuple[float, float]], first: str, second: str, ratio: str
) -> dict[str, Spread]:
    """The spreads of the first and the second of each pair, and of the first over the second."""
    firsts, seconds = zip(*pairs, strict=True)
    ratios = [one / other for one, other in pairs]
    return {first: Spread.of(firsts), second: Spread.of(seconds), ratio: Spread.of(ratios)}


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Result:
    """One row: a test, its conditions and its results.

    `suite` is the table that the row belongs to. `conditions` and `found` are the cells by their
    JSON names; shares are fractions of one, times are in seconds.
    """

    suite: str
    test: str
    conditions: dict[str, Any]
    found: dict[str, Any]
    verdict: str

    def as_json(self) -> dict[str, Any]:
        """The row as one flat object."""
        found = {
            name: {"median": value.median, "min": value.min, "max": value.max}
            if isinstance(value, Spread)
            else value
            for name, value in self.found.items()
        }
        return {
            "suite": self.suite,
            "test": self.test,
            **self.conditions,
            **found,
            "verdict": self.verdict,
        }


class Suite(ABC):
    """A part of the bench; an interrupted run keeps what it has measured."""

    @property
    def limits(self) -> Rates | None:
        """The machine's rates, if the suite has measured them."""
        return None

    @abstractmethod
    def run(self, progress: Callable[[str], None]) -> None:
        """Measure, and tell `progress` what comes next."""

    @abstractmethod
    def results(self) -> list[Result]:
        """A row for each test so far."""


class ListedSuite(Suite):
    """A suite that adds each row once it is measured."""

    def __init__(self) -> None:
        self._results: list[Result] = []

    def results(self) -> list[Result]:
        return list(self._results)
