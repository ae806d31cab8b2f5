"""How often a drafter is tried, by what its trials have lost."""

import pytest

from localllm.drafting.draft_trials import DraftTrials

LONGEST_TRIED = 5000


def steps_to_trial(trials: DraftTrials) -> int:
    """The steps until the drafter, which proposes in each, is to be tried."""
    for count in range(1, LONGEST_TRIED):
        trials.proposed(0, 1, 1.0, is_known=True)
        if trials.next_tried(None, [0]) == 0:
            return count
    return LONGEST_TRIED


def try_once(trials: DraftTrials, num_steps: float, num_tokens: float) -> None:
    """The steps of a trial that has begun, each of which takes so many steps' time."""
    for left in reversed(range(6)):
        trials.took(0, num_steps, num_tokens)
        if left:
            assert trials.next_tried(None, [0]) == 0


@pytest.mark.parametrize("pays_for_some", [False, True])
def test_a_trial_that_lost_is_long_not_repeated(pays_for_some: bool) -> None:
    trials = DraftTrials([True])
    for _ in range(2):
        assert steps_to_trial(trials) < 1000
        try_once(trials, 2.4, 1.6)  # 4.8 steps lost: half a percent of 960
        if pays_for_some:
            trials.pays(0)  # as when most of the requests have ended
    assert steps_to_trial(trials) == pytest.approx(960, abs=1)


def test_drafts_that_a_trial_led_to_count_with_it() -> None:
    trials = DraftTrials([True])
    steps_to_trial(trials)
    trials.took(0, 1.0, 1.6)
    for _ in range(20):
        trials.pays(0)
        trials.took(0, 2.0, 1.6)
    trials.pays(0)
    assert steps_to_trial(trials) == pytest.approx(7.4 / 0.005, abs=8)


def test_gains_are_not_saved_up() -> None:
    trials = DraftTrials([True])
    steps_to_trial(trials)
    for _ in range(500):
        trials.pays(0)
        trials.took(0, 1.0, 1.6)
    trials.pays(0)
    assert steps_to_trial(trials) < 100
    for most in (100, 500):
        try_once(trials, 2.4, 1.6)
        assert 0.9 * most < steps_to_trial(trials) < most


@pytest.mark.parametrize(
    ("drafts_always", "is_known", "is_whole", "steps"),
    [
        (False, False, True, 1),
        (False, False, False, 48),
        (False, True, True, 48),
        (True, False, True, 48),
    ],
)
def test_a_copy_is_tried_again_at_once_until_enough_is_known(
    drafts_always: bool, is_known: bool, is_whole: bool, steps: int
) -> None:
    trials = DraftTrials([drafts_always])
    first = 0
    while trials.next_tried(None, [0]) is None:
        trials.proposed(0, 1, 1.0, is_known=False)
        first += 1
    # A trial that looks for matches is short, so it comes early.
    assert first == (96 if drafts_always else 4)
    trials.pays(0)
    trials.drafts(0)
    trials.proposed(0, 0, 1.0, is_known=is_known)
    trials.accepted(0, is_whole=is_whole)
    assert trials.is_trying == (steps == 1)
    assert steps_to_trial(trials) == steps


def test_no_trial_waits_for_a_copy_that_has_ended() -> None:
    trials = DraftTrials([False])
    trials.accepted(0, is_whole=True)
    assert trials.is_trying
    trials.asked_in_vain(0)
    assert not trials.is_trying
