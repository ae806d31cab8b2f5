"""What a test found: numbers with their spread, and one line that says what they mean."""

import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.cost.rates import Rates


@dataclass(frozen=True, slots=True)
class Spread:
    """Median, least and greatest of repeated measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class Result:
    """One row: which test, under which conditions, what came out.

    `suite` is the table that it stands in. `conditions` and `found` are the cells by their JSON
    names; shares are of one, times in seconds.
    """

    suite: str
    test: str
    conditions: dict[str, Any]
    found: dict[str, Any]
    verdict: str

    def as_json(self) -> dict[str, Any]:
        """One flat object."""
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
    """A part of the bench; what is measured when it is interrupted stays."""

    @property
    def limits(self) -> Rates | None:
        """The machine's rates, where the suite has measured them."""
        return None

    @abstractmethod
    def run(self, progress: Callable[[str], None]) -> None:
        """Measure; the progress is told what comes next."""

    @abstractmethod
    def results(self) -> list[Result]:
        """A row for each test so far."""
