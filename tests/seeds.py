"""Seeds for tests of random cases: some for every run, more for the slow suite."""

from typing import Any

import pytest


def seeds(always: int, at_all: int) -> list[Any]:
    """`always` seeds that every run takes, `at_all` with those of `pytest -m slow`."""
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(always, at_all)]
    return [*range(always), *slow]
