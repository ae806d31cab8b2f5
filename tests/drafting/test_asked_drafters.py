"""Whom a speculator asks, shows hidden states and gets ready, and when."""

from collections.abc import Callable, Collection, Sequence
from random import Random
from typing import Any

import pytest
import torch
from drafting import Oracle
from simulated import simulate

from localllm.drafting.assistant_drafter import AssistantDrafter
from localllm.drafting.draft_model import DraftModel
from localllm.drafting.drafter import Drafter, Proposal
from localllm.drafting.head_drafter import HeadDrafter
from localllm.drafting.ngram import NgramDrafter
from localllm.drafting.speculator import Proposer, Speculator
from localllm.schedule.request import Request
from localllm.schedule.runner import Computed, HeadDraft
from localllm.schedule.scheduler import SampledToken, ScheduledBatch


def random_text(seed: int, length: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(50_000) for _ in range(length)]


def new_speculator(*drafters: Drafter) -> Speculator:
    """By its clock looks take no time."""
    return Speculator([Proposer("test", each) for each in drafters], 15, now=lambda: 0.0)


def cheap_rows(rows: int) -> float:
    return 1e-3 * (1 + 0.01 * rows)


class KnowingHead:
    """The runner of a head each of whose tokens is right with the same chance."""

    overlaps = True
    is_warm = True

    def __init__(self, answer: Sequence[int], chance: float) -> None:
        self._answer, self._chance, self._random = answer, chance, Random(1)

    def draft(self, drafts: Sequence[HeadDraft], hidden: torch.Tensor) -> None:
        """Not at once."""

    def launch(self, batch: ScheduledBatch, hidden: torch.Tensor | None = None) -> Computed:
        sampled, num_rows = [], 0
        for entry in batch.requests:
            num_rows += entry.num_scheduled_tokens
            if entry.catches_up:
                said = entry.known_end - entry.request.num_prompt_tokens
                is_right = said < len(self._answer) and self._random.random() < self._chance
                sampled.append([SampledToken(self._answer[said] if is_right else 99_999)])
        return Computed(sampled, (torch.zeros(num_rows, 1),))


class Blocks:
    """The cache of a head, of which only the sizes matter."""

    block_size = 16
    stacks = ()

    def num_blocks(self, group: int) -> int:
        return 1 << 12


class WatchedHead(HeadDrafter):
    """Counts what it is shown, and how often it is asked."""

    num_seen = num_asked = 0

    def see(self, batch: ScheduledBatch, hidden: Sequence[torch.Tensor]) -> None:
        self.num_seen += 1
        super().see(batch, hidden)

    def propose(self, request: Request, count: int) -> Proposal | None:
        self.num_asked += 1
        return super().propose(request, count)


def new_head(answer: Sequence[int], chance: float) -> WatchedHead:
    runner: Any = KnowingHead(answer, chance)
    cache: Any = Blocks()
    return WatchedHead(runner, cache, [0], 1, 1 << 15, 4096)


@pytest.mark.parametrize("num_prompt", [40, 400])
@pytest.mark.parametrize("has_ngrams", [False, True])
@pytest.mark.parametrize(("chance", "least"), [(0.8, 2.0), (0.0, 0.97)])
def test_a_head_drafts_where_steps_overlap(
    chance: float, least: float, has_ngrams: bool, num_prompt: int
) -> None:
    """It falls behind between the steps that wait for ids, and catches up once its drafts are
    wanted. A step that waits takes a fifth longer.
    """
    texts = [(random_text(1, num_prompt), random_text(2, 2500))]
    n_grams = [NgramDrafter(2, 8)] if has_ngrams else []
    found = simulate(
        new_speculator(*n_grams, new_head(texts[0][1], chance)),
        texts,
        lambda rows: 1e-3 * (1 + 0.002 * rows),
        5e-5,
        overlaps=True,
        wait_seconds=2e-4,
    )
    assert found.num_tokens >= 2499
    assert found.speedup > least, found


def test_a_useless_head_is_left_alone_between_its_trials() -> None:
    texts = [(random_text(1, 40), random_text(2, 6000))]
    head = new_head(texts[0][1], 0.0)
    found = simulate(new_speculator(head), texts, lambda rows: 1e-3 * (1 + 0.1 * rows), 5e-5)
    assert found.num_steps > 5900
    assert head.num_asked < 0.06 * found.num_steps, head.num_asked
    assert head.num_seen < 0.4 * found.num_steps, head.num_seen


def test_a_head_is_not_asked_while_text_is_copied() -> None:
    prompt = random_text(1, 400)
    texts = [(prompt, 5 * prompt)]
    head = new_head(texts[0][1], 1.0)
    found = simulate(new_speculator(NgramDrafter(2, 8), head), texts, cheap_rows, 5e-5)
    assert found.speedup > 8
    assert head.num_asked < 0.15 * found.num_steps, head.num_asked


class CountingNgrams(NgramDrafter):
    num_looks = 0

    def propose(self, request: Request, count: int) -> Proposal | None:
        self.num_looks += 1
        return super().propose(request, count)


@pytest.mark.parametrize(("look_s", "share"), [(0.0, 1.0), (2e-4, 0.02)])
def test_looks_that_find_nothing_take_little_of_the_time(look_s: float, share: float) -> None:
    texts = [(random_text(1, 40), random_text(2, 4000))]
    ngrams, now = CountingNgrams(2, 8), 0.0

    def tick() -> float:
        nonlocal now
        now += look_s
        return now

    found = simulate(Speculator([Proposer("n-grams", ngrams)], 15, now=tick), texts, cheap_rows)
    assert found.num_steps > 3900
    assert ngrams.num_looks <= share * found.num_steps, ngrams.num_looks


def test_what_an_ended_request_said_is_found_by_the_next() -> None:
    said, speculator = random_text(3, 300), new_speculator(NgramDrafter(2, 8))
    first = simulate(speculator, [(said[:20], said[20:])], cheap_rows)
    again = simulate(speculator, [(random_text(4, 50) + said[:20], said[20:])], cheap_rows)
    assert first.speedup < 1.1
    assert again.speedup > 4
    forgetful = simulate(speculator.renewed(), [(said[:20], said[20:])], cheap_rows)
    assert forgetful.speedup < 1.1


class ColdRunner:
    """A runner that has this many pieces of work to do ahead."""

    def __init__(self, pieces: int) -> None:
        self.pieces = pieces

    @property
    def is_warm(self) -> bool:
        return not self.pieces

    def work_ahead(self) -> bool:
        has_work = self.pieces > 0
        self.pieces -= has_work
        return has_work


@pytest.mark.parametrize(
    "new",
    [
        lambda runner, cache: DraftModel(runner, cache, 256, 64),
        lambda runner, cache: HeadDrafter(runner, cache, [0], 1, 256, 64),
        lambda runner, cache: AssistantDrafter(runner, [0], 256),
    ],
    ids=["draft model", "head", "assistant"],
)
def test_drafters_are_warm_once_their_models_are(new: Callable[[Any, Any], Drafter]) -> None:
    speculator = new_speculator(NgramDrafter(2, 8), new(ColdRunner(2), Blocks()))
    seen = [(speculator.is_warm, speculator.work_ahead()) for _ in range(3)]
    assert seen == [(False, True), (False, True), (True, False)]


class UnreadyHead(Oracle):
    """Has to be prepared for each request, one in a step; each of its tokens is right or wrong."""

    def __init__(self, answer: Callable[[Request], Sequence[int]], *, is_right: bool) -> None:
        super().__init__(answer, float(is_right))
        self._is_right = is_right
        self._ready, self._unready = set[Request](), list[Request]()
        # The requests that each step has drafted for, of those with any; and how it was prepared.
        self.drafted: list[int] = []
        self.as_trial: list[bool] = []

    @property
    def is_cheap(self) -> bool:
        return False

    def propose(self, request: Request, count: int) -> Proposal:
        said = request.num_generated_tokens
        own = [*self.answer(request)[said : said + count]] if self._is_right else [-2] * count
        return Proposal(own or [0], 0, is_ready=request in self._ready)

    def prepare(self, request: Request, *, is_trial: bool) -> None:
        self.as_trial.append(is_trial)
        if request not in self._unready:
            self._unready.append(request)

    @property
    def has_work(self) -> bool:
        return bool(self._unready)

    def work(self, batch: ScheduledBatch) -> None:
        self._ready.add(self._unready.pop())

    def complete(self, batch: ScheduledBatch, own: Collection[Request]) -> None:
        if own:
            self.drafted.append(len(own))


def test_a_trial_in_a_batch_begins_once_all_are_ready_and_ends_soon_if_it_gives_nothing() -> None:
    texts = [(random_text(i, 50), random_text(100 + i, 200)) for i in range(8)]
    head = UnreadyHead(lambda request: (), is_right=False)
    # Beside the drafts of eight rows a step takes twice the time: nobody drafts unless to try.
    simulate(new_speculator(head), texts, lambda rows: 1e-3 * max(1.0, rows / 8))
    assert set(head.drafted) == {8}
    assert len(head.drafted) <= 4


def test_a_head_of_which_little_is_known_is_prepared_with_little() -> None:
    texts = [(random_text(i, 50), random_text(100 + i, 300)) for i in range(2)]
    answers = {tuple(prompt): answer for prompt, answer in texts}
    head = UnreadyHead(lambda request: answers[tuple(request.token_ids[:50])], is_right=True)
    speculator = new_speculator(head)
    for text in texts:
        simulate(speculator, [text], cheap_rows, 1e-4)
    assert head.as_trial[0]
    assert not head.as_trial[-1]
