"""Rests: they go on while steps become faster, and only their last steps count."""

import pytest

from localllm.drafting.draft_choice import DraftChoice
from localllm.drafting.draft_lengths import Candidate, DraftHistory, DraftLengths
from localllm.drafting.plain_rest import PlainRest

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


def paying(*, has_matches: bool) -> tuple[DraftLengths, Candidate]:
    """Lengths that know that a draft of one token pays, and such a draft."""
    lengths, history = DraftLengths(4, has_matches=has_matches), DraftHistory()
    for _ in range(20):
        lengths.add_step(1, 1.0, 0, is_plain=True)
        lengths.add_step(2, 1.1, 1, is_plain=False)
        lengths.add_outcome(history, 0, 1, 1)
    return lengths, Candidate(history, 0, 1)


@pytest.mark.parametrize("has_matches", [False, True])
def test_rests_that_tell_nothing_become_rare(has_matches: bool) -> None:
    """As where a grammar forces some token in nearly every step."""
    lengths, candidate = paying(has_matches=has_matches)
    choice, num_resting = DraftChoice([lengths]), 0
    for _ in range(4000):
        if choice.rests():
            num_resting += 1
        else:
            choice.choose(1, 1, [[candidate]], 1)
    assert 30 <= num_resting < 0.15 * 4000


def test_a_drafter_that_copies_rests_too_but_not_soon() -> None:
    lengths, candidate = paying(has_matches=True)
    choice = DraftChoice([lengths])
    first = next(i for i in range(1000) if choice.choose(1, 1, [[candidate]], 1) and choice._rest)
    assert first == 511


def test_steps_without_drafts_that_nobody_times_put_off_no_rest() -> None:
    """Such as the first ones of each text, whose times tell nothing."""
    lengths, candidate = paying(has_matches=False)
    choice = DraftChoice([lengths])
    num_rests = 0
    for step in range(1000):
        choice.choose(1, 1, [[candidate if step % 50 else None]], 1)
        if choice.is_resting:
            num_rests += 1
            while choice.is_resting:
                for _ in choice.rested(1, 1.0):
                    choice.timed_plain()
    # Behind 4, 16, 64, 256 and 512 decisions.
    assert num_rests == 5
