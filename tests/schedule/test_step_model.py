"""What steps take is told from how fast the machine is."""

from math import exp
from random import Random

import pytest

from localllm.schedule import step_model
from localllm.schedule.step_clock import StepClock
from localllm.schedule.step_model import StepModel

# f and s of the drafts of these tests.
FIXED, MARGINAL = 0.3, 0.15


def seconds(length: int = 0) -> float:
    """Of a step on a machine as it was at first."""
    return 1e-3 * (1 + FIXED + MARGINAL * length if length else 1)


def learned_model() -> StepModel:
    """One that knows both kinds of steps."""
    model = StepModel(1)
    for length in 10 * [1, 4, 2, 8]:
        model.add_plain(1, seconds(), is_settled=True)
        for _ in range(4):
            model.add_drafts(1, 0, length, seconds(length))
    return model


def test_what_drafts_cost_is_not_what_others_slow_down() -> None:
    """Others use the machine for some thirty steps, again and again, and it is measured rarely how
    fast it is: by three plain steps of fifty.
    """
    rng, model, slowness = Random(1), StepModel(1), 1.0
    off = list[float]()
    for number in range(3000):
        if number % 30 == 0:
            slowness = rng.choice([1.0, 1.0, 1.15, 1.35])
        now = slowness * rng.gauss(1.0, 0.05)
        if number % 50 < 3:
            model.add_plain(1, seconds() * now, is_settled=True)
        else:
            length = 1 + number // 10 % 4
            model.add_drafts(1, 0, length, seconds(length) * now)
        if number > 500:
            fixed, marginal = model.line(0)
            off += [(1 + fixed + marginal * 2) / (seconds(2) * 1e3)]
    assert min(off) > 0.85
    assert max(off) < 1.15


def test_a_step_that_something_else_made_slow_tells_nothing() -> None:
    model = learned_model()
    before = model.plain_seconds, model.line(0)
    model.add_drafts(1, 0, 2, 30 * seconds(2))
    model.add_plain(1, 30 * seconds(), is_settled=True)
    assert (model.plain_seconds, model.line(0)) == before
    assert not model.is_doubtful


@pytest.mark.parametrize("is_the_machine", [True, False])
@pytest.mark.parametrize("change", [3.0, 0.4])
def test_plain_steps_tell_whether_the_machine_or_drafts_have_changed(
    change: float, is_the_machine: bool
) -> None:
    model = learned_model()
    for _ in range(3):
        model.add_drafts(1, 0, 2, change * seconds(2))
    assert model.is_doubtful
    now = change if is_the_machine else 1.0
    model.add_plain(1, now * seconds(), is_settled=True)
    assert not model.is_doubtful
    assert model.plain_seconds == pytest.approx(now * seconds(), rel=0.1)
    fixed, marginal = model.line(0)
    # Never less than a plain step.
    wanted = max(1.0, (1.0 if is_the_machine else change) * seconds(2) * 1e3)
    assert max(1.0, 1 + fixed + 2 * marginal) == pytest.approx(wanted, rel=0.15)


@pytest.mark.parametrize("drift", [None, (0.0, 0.0, 0.0)])
def test_where_requests_end_steps_take_less_and_drafts_cost_the_same(
    drift: tuple[float, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if drift is not None:
        monkeypatch.setattr(step_model, "SIZE_DRIFT", drift)
    model = StepModel(1)
    for _ in range(10):
        model.add_plain(16, 16 * seconds(), is_settled=True)
        for length in (1, 1, 1, 1, 4):
            model.add_drafts(16, 0, length, 16 * seconds(length))
    for size in (12, 8, 6, 4):
        for _ in range(2):
            model.add_drafts(size, 0, 2, size * seconds(2))
    if drift is not None:
        # It is needed: without it the machine seems to have changed.
        assert model.is_doubtful
    else:
        assert not model.is_doubtful
        assert model.plain_seconds == pytest.approx(4 * seconds(), rel=0.15)
        fixed, marginal = model.line(0)
        assert 1 + fixed + 2 * marginal == pytest.approx(seconds(2) * 1e3, rel=0.15)


def test_costs_are_never_negative() -> None:
    model = StepModel(1)
    model.add_plain(1, 1e-3, is_settled=True)
    for length in 20 * [1, 3]:
        model.add_drafts(1, 0, length, 0.8e-3)
    assert min(model.line(0)) >= -1e-9


@pytest.mark.parametrize("seed", range(24))
def test_nothing_that_other_work_does_to_steps_leads_far_astray(seed: int) -> None:
    rng = Random(seed)
    num_drafters = rng.choice((1, 2, 3))
    clock = StepClock(num_drafters)
    base, size, seen = 10 ** rng.uniform(-4, -1), 1, list[float]()
    for _ in range(400):
        size = rng.randint(1, 48) if rng.random() < 0.3 else size
        longer = exp(abs(rng.gauss(0, 2)) * rng.choice((0, 0, 1))) * rng.choice((1, 1, 1, 1, 1, 30))
        plain = base * (1 + 0.1 * size) * longer
        if rng.random() < 0.5:
            clock.add_plain(size, plain)
            seen.append(plain)
        else:
            length = rng.choice((0.02, 0.1, 0.5, 1, 3, 15))
            clock.unsettle()
            drafted = plain * (1.3 + 0.2 * length)
            clock.model.add_drafts(size, rng.randrange(num_drafters), length, drafted)
        if seen:
            assert min(seen) / 1e4 < clock.model.plain_seconds < max(seen) * 1e4
