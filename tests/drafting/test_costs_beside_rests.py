"""What drafts cost beside a rest, on a machine whose speed changes."""

import pytest

from localllm.drafting.costs_beside_rests import CostsBesideRests
from localllm.schedule.step_times import StepTimes


def plain_times(seconds: float = 1.0) -> StepTimes:
    """Of a machine whose steps of one row usually take so long."""
    times = StepTimes()
    for _ in range(9):
        times.add(1, seconds)
    return times


def test_until_a_rest_drafts_are_compared_with_what_is_usual() -> None:
    costs = CostsBesideRests(plain_times())
    for _ in range(6):
        costs.add(1, 1, 1.6)
    assert costs.factor(1, 1) == pytest.approx(1.6)


def test_steps_before_and_behind_a_rest_are_compared_with_it() -> None:
    costs = CostsBesideRests(plain_times())
    for _ in range(6):
        costs.add(1, 1, 2.4)  # all is slower by half now
    costs.rested(1, [1.5] * 3)
    assert costs.factor(1, 1) == pytest.approx(1.6)
    assert costs.slowness == pytest.approx(1.5)
    for _ in range(8):
        costs.add(1, 1, 2.7)
    assert costs.factor(1, 1) == pytest.approx(1.8)


def test_steps_far_from_a_rest_say_nothing_of_what_a_draft_costs() -> None:
    costs = CostsBesideRests(plain_times())
    costs.rested(1, [1.5] * 3)
    for _ in range(8):
        costs.add(1, 1, 2.4)
    for _ in range(30):
        costs.add(1, 1, 1.6)  # as fast as usual again
    assert costs.factor(1, 1) == pytest.approx(1.6)
    for _ in range(30):
        costs.add(1, 1, 5.0)
    costs.begin_anew()
    costs.rested(1, [1.0] * 3)
    assert costs.factor(1, 1) == pytest.approx(1.6)


def test_how_much_more_a_longer_draft_costs_is_learned_anywhere() -> None:
    """All is slower by half there, but for both lengths."""
    costs = CostsBesideRests(plain_times())
    costs.rested(1, [1.0] * 3)
    for _ in range(8):
        costs.add(1, 1, 1.6)
    for _ in range(20):
        costs.add(1, 1, 2.4)
        costs.add(1, 3, 4.8)
    assert costs.factor(1, 1) == pytest.approx(1.6)
    found = costs.factor(1, 3)
    assert found is not None
    assert 2.9 < found < 3.3


def test_what_is_forgotten_is_not_known() -> None:
    costs = CostsBesideRests(plain_times())
    for _ in range(6):
        costs.add(1, 1, 1.6)
    costs.rested(1, [1.0] * 3)
    costs.forget(1)
    assert costs.factor(1, 1) is None
