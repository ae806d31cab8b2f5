"""What drafts are believed to cost."""

import pytest

from localllm.schedule.step_times import DraftCosts, StepTimes


def test_few_steps_tell_nothing() -> None:
    costs = DraftCosts(least=3)
    for _ in range(2):
        costs.add(1, 3, 2.0)
    assert costs.factor(1, 3) is None


def test_a_cost_lies_on_lines_through_those_measured() -> None:
    costs = DraftCosts()
    for num_drafted, factor in ((2, 1.6), (4, 2.0)):
        for _ in range(3):
            costs.add(1, num_drafted, factor)
    # Half of what the shortest costs is the same for all, so the line to it begins at 1.3.
    expected = {1: 1.45, 2: 1.6, 3: 1.8, 4: 2.0, 8: 2.8}
    assert {n: costs.factor(1, n) for n in expected} == pytest.approx(expected)


def test_a_cost_measured_long_ago_is_forgotten_whatever_the_length_was() -> None:
    costs = DraftCosts()
    for _ in range(5):
        costs.add(1, 5, 1.1)  # while everything else was slow
    for _ in range(100):
        costs.add(1, 4, 2.6)
    assert costs.factor(1, 4) == pytest.approx(2.6)
    found = costs.factor(1, 5)
    assert found is not None
    assert found > 2.6


def test_steps_of_all_sizes_nearby_count_as_known() -> None:
    times = StepTimes()
    for rows in (7, 8, 8, 8, 20):
        times.add(rows, 1e-3)
    assert times.knows(8, 4)
    assert not times.knows(8, 5)
    assert not times.knows(12)


def test_a_slow_step_of_fewer_rows_changes_nothing_about_a_measured_size() -> None:
    times = StepTimes()
    times.add(12, 9e-3)
    for _ in range(9):
        times.add(16, 3e-3)
    assert times.seconds(16) == pytest.approx(3e-3)


def test_a_rare_size_takes_no_longer_than_slightly_greater_ones() -> None:
    times = StepTimes()
    times.add(15, 3e-3)  # while the machine was slow
    for _ in range(3):
        times.add(16, 2e-3)
    times.add(32, 1e-3)
    assert times.seconds(15) == pytest.approx(2e-3)
    assert times.seconds(16) == pytest.approx(2e-3)


def test_a_cost_holds_for_nearly_as_many_rows() -> None:
    costs = DraftCosts()
    for num_drafted, factor in ((16, 1.6), (32, 2.0)):
        for _ in range(3):
            costs.add(16, num_drafted, factor)
    for rows in (14, 15, 18):
        assert costs.factor(rows, rows) == pytest.approx(1.6)
        assert costs.factor(rows, 2 * rows) == pytest.approx(2.0)
        assert costs.longest(rows) == 2 * rows
    assert costs.factor(12, 12) is None
    for _ in range(3):
        costs.add(15, 15, 1.2)
    assert costs.factor(15, 15) == pytest.approx(1.2)
    assert costs.factor(14, 14) == pytest.approx(1.2), "the nearest one"
