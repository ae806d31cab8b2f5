"""Percentiles and spreads with values to check by hand, and what JSON makes of a row."""

import pytest

from localllm.bench.results import Result, Spread, percentile


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.5, 3.0), (0.2, 1.0), (0.21, 2.0), (0.99, 5.0), (1.0, 5.0), (0.0, 1.0)],
)
def test_a_percentile_is_the_value_of_the_nearest_rank(share: float, expected: float) -> None:
    assert percentile([5.0, 1.0, 4.0, 2.0, 3.0], share) == expected


def test_the_99th_percentile_of_few_values_is_the_greatest() -> None:
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([float(i) for i in range(1, 201)], 0.99) == 198.0


def test_a_spread() -> None:
    assert Spread.of([4.0, 1.0, 2.0]) == Spread(2.0, 1.0, 4.0)
    assert Spread.of([4.0, 2.0]).median == 3.0


def test_a_row_in_json_is_flat_but_for_its_spreads() -> None:
    row = Result("speed", "tg8", {"batch": 4}, {"tokens_per_s": Spread(2.0, 1.0, 3.0)}, "fine")
    assert row.as_json() == {
        "suite": "speed",
        "test": "tg8",
        "batch": 4,
        "tokens_per_s": {"median": 2.0, "min": 1.0, "max": 3.0},
        "verdict": "fine",
    }
