"""Rests: they go on while steps become faster, and only their last steps count."""

import pytest

from localllm.engine.draft_choice import DraftChoice
from localllm.engine.draft_lengths import Candidate, DraftHistory, DraftLengths
from localllm.engine.plain_rest import PlainRest

# Microseconds of steps of pocket after those with drafts, on two threads of one core: nobody had
# drafted at 333.
SLOW = [534, 517, 479, 459, 433, 396, 389, 386, 378, 374, 363, 358, 358, 354, 356, 353, 351]


def rest_of(seconds: list[float], rows: list[int] | None = None) -> tuple[PlainRest, int]:
    """A rest with such steps, and how many of them it took."""
    rest = PlainRest()
    for count, each in enumerate(seconds, start=1):
        rest.add(rows[count - 1] if rows else 1, each)
        if rest.is_over:
            return rest, count
    return rest, len(seconds)


def test_a_rest_goes_on_while_steps_become_faster() -> None:
    rest, count = rest_of([each * 1e-6 for each in SLOW])
    assert rest.is_over
    assert count == 15
    assert min(rest.settled) < 1.07 * 333e-6


def test_steps_that_take_the_same_end_a_rest_soon() -> None:
    rest, count = rest_of([1.0] * 30)
    assert count == 6
    assert list(rest.settled) == [1.0] * 3


def test_a_rest_ends_where_steps_become_faster_for_ever() -> None:
    rest, count = rest_of([0.9**i for i in range(50)])
    assert (rest.is_over, count) == (True, 15)


@pytest.mark.parametrize("when", [1, 4])
def test_steps_of_other_rows_end_a_rest_and_tell_nothing(when: int) -> None:
    rest, count = rest_of([1.0] * 20, [8] * when + [7] * 20)
    assert (rest.is_over, count) == (True, when + 1)
    assert list(rest.settled) == []


def test_a_rest_ends_though_none_of_its_steps_tells_anything() -> None:
    """Such as those with drafts that a grammar forces."""
    choice = DraftChoice([DraftLengths(4, has_matches=False)])
    choice._rest = PlainRest()
    assert sum(choice.rests() for _ in range(100)) == 30
    assert not choice.is_resting


def test_steps_without_drafts_that_nobody_times_put_off_no_rest() -> None:
    """Such as the first ones of each text, whose times tell nothing."""
    lengths, history = DraftLengths(4, has_matches=False), DraftHistory()
    for _ in range(20):
        lengths.add_step(1, 1.0, 0, is_plain=True)
        lengths.add_step(2, 1.1, 1, is_plain=False)
        lengths.add_outcome(history, 0, 1, 1)
    choice = DraftChoice([lengths])
    num_rests = 0
    for step in range(1000):
        candidate = Candidate(history, 0, 1) if step % 50 else None
        choice.choose(1, 1, [[candidate]], 1)
        if choice.is_resting:
            num_rests += 1
            while choice.is_resting:
                for _ in choice.rested(1, 1.0):
                    choice.timed_plain()
    # Behind 4, 16, 64, 256 and 512 decisions.
    assert num_rests == 5
