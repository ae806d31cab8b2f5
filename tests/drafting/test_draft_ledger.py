"""What drafts may cost before their drafter pauses."""

import pytest

from localllm.drafting.draft_ledger import DraftLedger


@pytest.mark.parametrize(("num_requests", "most"), [(1, 8), (2, 6), (16, 4.25)])
def test_drafts_for_many_requests_may_cost_less(num_requests: int, most: float) -> None:
    ledger, cost = DraftLedger(), 0.0
    while not ledger.pauses:
        ledger.book(-0.25, num_requests)
        cost += 0.25
    assert cost == most + 0.25


def test_the_first_loss_is_measured_before_a_pause() -> None:
    ledger = DraftLedger()
    assert ledger.book(-9, can_measure=True)
    assert not ledger.pauses
    assert not ledger.book(-9, can_measure=True)
    assert ledger.left == 64
