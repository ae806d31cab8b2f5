"""Random cases: some for every run, more for the slow suite."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis.strategies import SearchStrategy

exact = settings(deadline=None, derandomize=True, print_blob=True)


def seeds(always: int, at_all: int) -> list[Any]:
    """`always` seeds that every run takes, `at_all` with those of `pytest -m slow`."""
    slow = [pytest.param(seed, marks=pytest.mark.slow) for seed in range(always, at_all)]
    return [*range(always), *slow]


def drawn(
    always: int, at_all: int, *strategies: SearchStrategy[Any]
) -> Callable[[Callable[..., None]], Callable[[int], None]]:
    """A test of drawn arguments: `always` cases in every run, `at_all` in `pytest -m slow`."""
    counts = [always, pytest.param(at_all, marks=pytest.mark.slow)]

    def of(check: Callable[..., None]) -> Callable[[int], None]:
        @pytest.mark.parametrize("num_cases", counts)
        def test(num_cases: int) -> None:
            settings(exact, max_examples=num_cases)(given(*strategies)(check))()

        test.__name__, test.__doc__ = check.__name__, check.__doc__
        test.__module__, test.__qualname__ = check.__module__, check.__qualname__
        return test

    return of
