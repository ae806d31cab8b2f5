"""n-grams: what is indexed, when, and for whom it is found."""

from random import Random

from scheduling import make_request

from localllm.drafting.drafter import Proposal
from localllm.drafting.ngram import NgramDrafter
from localllm.schedule.request import Request
from localllm.schedule.scheduler import ScheduledBatch, ScheduledRequest


def random_text(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(50_000) for _ in range(length)]


def step_of(*requests: Request, num_tokens: int) -> ScheduledBatch:
    """A step that computes so many tokens of its first request."""
    counts = [num_tokens, *(0 for _ in requests[1:])]
    return ScheduledBatch(
        [ScheduledRequest(r, 0, n, catches_up=False) for r, n in zip(requests, counts, strict=True)]
    )


def test_what_a_request_of_another_salt_said_is_not_found() -> None:
    drafter = NgramDrafter(2, 8)
    said = make_request(0, 5)
    said.token_ids += random_text(3, 35)
    said.salt = b"a"
    drafter.add(said)
    drafter.work(step_of(said, num_tokens=40))
    drafter.forget(said)
    for salt, is_found in ((b"a", True), (b"", False), (b"b", False)):
        request = make_request(1, 4)
        request.token_ids[:] = [500, *said.token_ids[10:13]]
        request.salt = salt
        drafter.add(request)
        drafter.work(step_of(request, num_tokens=40))
        assert (drafter.propose(request, 4) is not None) == is_found


def test_a_long_prompt_is_indexed_beside_its_steps_and_not_at_once() -> None:
    drafter = NgramDrafter(2, 8)
    request = make_request(0, 5000)
    request.token_ids = random_text(5, 2500) * 2
    drafter.add(request)
    assert drafter.propose(request, 8) is None
    for _ in range(11):
        drafter.work(step_of(request, num_tokens=144))  # and 256 more
        assert drafter.propose(request, 8) is None
    drafter.work(step_of(request, num_tokens=344))
    found = drafter.propose(request, 8)
    assert found is not None
    assert found.token_ids == request.token_ids[:8]
    assert found.match_length == 8


def test_what_a_kept_prompt_begins_with_is_not_indexed_again() -> None:
    drafter = NgramDrafter(2, 8)
    first, turn, other = (make_request(i, 5000) for i in range(3))
    first.token_ids = random_text(5, 500) * 2
    first.num_prompt_tokens = len(first.token_ids)
    # Its answer is not part of the prompt, and not of what begins like it.
    first.token_ids = first.token_ids + random_text(6, 100)
    turn.token_ids = first.token_ids[:1000] + random_text(7, 20)
    other.token_ids = random_text(5, 500) + random_text(8, 520)
    drafter.add(first)
    drafter.work(step_of(first, num_tokens=5000))
    drafter.add(turn)
    drafter.add(other)
    drafter.work(step_of(turn, other, num_tokens=30))
    assert drafter.propose(turn, 8) is None  # its newest tokens are new
    assert drafter.propose(other, 8) is None
    turn.token_ids += turn.token_ids[1000:1010]
    found = drafter.propose(turn, 8)
    assert found == Proposal(turn.token_ids[1010:1018], 8)
    other.token_ids += other.token_ids[1000:1010]
    assert drafter.propose(other, 8) is None  # not indexed yet
