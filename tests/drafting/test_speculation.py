"""The older policy on machines whose steps take what a function says: it gains where it can, and
nowhere loses more than what it takes to find that out.
"""

from collections.abc import Callable, Collection, Sequence
from itertools import count
from random import Random
from typing import Any

import pytest
import torch
from drafting import Oracle
from scheduling import make_request
from simulated import Simulated
from simulated import simulate as simulate_calls

from localllm.drafting.asking import MAX_DRAFTED_TOKENS
from localllm.drafting.assistant_drafter import AssistantDrafter
from localllm.drafting.draft_lengths import MARGIN, DraftHistory, DraftLengths
from localllm.drafting.draft_model import DraftModel
from localllm.drafting.drafter import Drafter, Proposal
from localllm.drafting.five_calls import FiveCalls
from localllm.drafting.head_drafter import HeadDrafter
from localllm.drafting.ngram import NgramDrafter
from localllm.drafting.speculation import Proposer, Speculator
from localllm.schedule.request import Request
from localllm.schedule.runner import Computed, HeadDraft
from localllm.schedule.scheduler import SampledToken, ScheduledBatch, ScheduledRequest
from localllm.schedule.step_times import StepTimes

# Seconds of a step by its rows: a GPU's memory is read once for all of them; a CPU's arithmetic
# counts for each; here a second row is a disaster.
MACHINES: dict[str, Callable[[int], float]] = {
    "bandwidth": lambda rows: 1e-3 + 2e-6 * rows,
    "arithmetic": lambda rows: 15e-3 + 3e-3 * rows,
    "nothing but arithmetic": lambda rows: 3e-3 * rows,
    "a cliff": lambda rows: 1e-3 + 4e-3 * (rows > 1) + 1e-5 * rows,
}


def simulate(speculator: Speculator, *args: Any, **more: Any) -> Simulated:
    return simulate_calls(FiveCalls(speculator, 1024), *args, **more)


def new_speculator() -> Speculator:
    # By this clock looking takes no time.
    return Speculator(
        [Proposer("n-grams", NgramDrafter(2, 8), DraftLengths(9))], 15, clock=lambda: 0.0
    )


def test_a_prompt_beside_drafts_counts_as_far_as_a_step_computes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    speculator, budgets = new_speculator(), list[int]()
    monkeypatch.setattr(speculator, "propose", lambda running, budget: budgets.append(budget) or {})
    FiveCalls(speculator, 256).plan([make_request(0, 5000)])
    assert budgets == [256]


def step_of(*requests: Request, num_tokens: int) -> ScheduledBatch:
    """A step that computes so many tokens of its first request."""
    counts = [num_tokens, *(0 for _ in requests[1:])]
    return ScheduledBatch(
        [ScheduledRequest(r, 0, n, catches_up=False) for r, n in zip(requests, counts, strict=True)]
    )


def random_text(seed: int, length: int, vocab: int = 50_000) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(vocab) for _ in range(length)]


def edited(text: list[int], seed: int, every: int = 25) -> list[int]:
    """A text with a token in `every` changed, and some new ones."""
    rng = Random(seed)
    out = []
    for token in text:
        changed = rng.randrange(every) == 0
        out += [rng.randrange(50_000) for _ in range(rng.randint(1, 3))] if changed else [token]
    return out


def misleading(seed: int, length: int) -> list[int]:
    """Pairs of tokens that come again and again, each time with something else behind them."""
    rng = Random(seed)
    text: list[int] = []
    while len(text) < length:
        text += [rng.randrange(5), 7, 8, 9, rng.randrange(50_000)]
    return text[:length]


@pytest.mark.parametrize("batch", [1, 8, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("kind", ["random", "misleading", "few different tokens"])
def test_text_that_does_not_repeat_is_never_slower(kind: str, machine: str, batch: int) -> None:
    make = {
        "random": random_text,
        "misleading": misleading,
        "few different tokens": lambda seed, length: random_text(seed, length, vocab=8),
    }[kind]
    texts = [(make(i, 200), make(1000 + i, 400)) for i in range(batch)]
    found = simulate(new_speculator(), texts, MACHINES[machine])
    # Where a second row costs as much as five steps, three drafts are needed to learn it.
    assert found.speedup > (0.96 if machine == "a cliff" else 0.98), found


@pytest.mark.parametrize(
    ("machine", "batch", "least"),
    [
        ("bandwidth", 1, 4.0),
        ("bandwidth", 8, 3.0),
        ("arithmetic", 1, 2.0),
        ("arithmetic", 8, 1.05),
        ("nothing but arithmetic", 8, 0.98),
        ("a cliff", 1, 1.5),
    ],
)
def test_text_that_is_copied_is_faster_where_rows_are_cheap(
    machine: str, batch: int, least: float
) -> None:
    texts = []
    for i in range(batch):
        prompt = random_text(i, 400)
        texts.append((prompt, edited(prompt, i)[:400]))
    found = simulate(new_speculator(), texts, MACHINES[machine])
    assert found.speedup > least, found


def test_a_machine_that_becomes_slow_for_many_rows_is_noticed() -> None:
    prompt = random_text(1, 300)
    num_steps = 0

    def seconds(rows: int) -> float:
        nonlocal num_steps
        num_steps += 1
        return 1e-3 * (rows if num_steps > 60 else 1)

    texts = [(prompt, 3 * edited(prompt, 2))]
    found = simulate(new_speculator(), texts, seconds)
    # Behind the first sixty steps nothing is gained, and little lost.
    assert found.seconds < 1.1 * 1e-3 * len(texts[0][1])


def test_what_an_ended_request_said_is_found_by_the_next() -> None:
    said = random_text(3, 300)
    speculator = new_speculator()
    machine = MACHINES["bandwidth"]
    first = simulate(speculator, [(said[:20], said[20:])], machine)
    again = simulate(speculator, [(random_text(4, 50) + said[:20], said[20:])], machine)
    assert first.speedup < 1.1
    assert again.speedup > 4
    forgetful = simulate(speculator.renewed(), [(said[:20], said[20:])], machine)
    assert forgetful.speedup < 1.1


def test_a_pause_ends_though_each_text_does_before_it() -> None:
    speculator = new_speculator()
    [ledger] = speculator._choice.ledgers
    ledger.left = 300
    for number in range(10):
        speculator = speculator.renewed()
        simulate(
            speculator,
            [(random_text(number, 20), random_text(50 + number, 40))],
            MACHINES["bandwidth"],
        )
    assert not ledger.pauses


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


class Counting(NgramDrafter):
    """Proposes what it is told to."""

    num_looks = 0
    proposal: Proposal | None = None

    def propose(self, request: Request, count: int) -> Proposal | None:
        self.num_looks += 1
        return self.proposal


def test_where_nothing_holds_few_steps_are_looked_at_but_all_that_were_waited_for() -> None:
    request = make_request(0, 100, max_tokens=400)
    drafter, ticks = Counting(2, 8), count()
    # A look takes a thousandth of a second, so does learning from each of two steps; a step 250.
    speculator = Speculator(
        [Proposer("test", drafter, DraftLengths(9))], 15, clock=lambda: next(ticks) / 1000
    )

    def take(num_steps: int, seconds: float, num_rows: int = 1) -> int:
        """The number of looks in so many steps."""
        before = drafter.num_looks
        request.num_computed_tokens = request.num_tokens - num_rows
        entry = ScheduledRequest(request, request.num_computed_tokens, num_rows, catches_up=True)
        for _ in range(num_steps):
            speculator.propose([request], 100)
            if speculator.is_watching:
                batch = ScheduledBatch([entry])
                speculator.learn(batch, [[SampledToken(5)]], seconds, has_waited=False)
        return drafter.num_looks - before

    # What a prompt's steps take does not count.
    assert take(20, 25.0, num_rows=100) == 0
    # An answer's first tokens cannot match, so nothing is learned from looks at them.
    assert take(20, 0.25) == 20
    request.token_ids += [1] * 10
    for num_steps, looks_wanted in ((4, 4), (100, 17), (100, 17)):
        assert abs(take(num_steps, 0.25) - looks_wanted) <= 5
    for _ in range(480):
        looks = drafter.num_looks
        has_waited = speculator.wants_ids()
        speculator.propose([request], 100)
        assert not has_waited or drafter.num_looks == looks + 1


@pytest.mark.parametrize(("sampled", "looks"), [([7, 5], 1), ([5], 0)])
def test_behind_a_draft_that_was_accepted_in_part_the_next_step_is_looked_at(
    sampled: list[int], looks: int
) -> None:
    request = make_request(0, 100, max_tokens=400)
    request.token_ids += [1] * 10
    request.num_computed_tokens = 109
    drafter, ticks = Counting(2, 8), count()
    speculator = Speculator(
        [Proposer("test", drafter, DraftLengths(9))], 15, clock=lambda: next(ticks) / 1000
    )
    plain = ScheduledBatch([ScheduledRequest(request, 109, 1, catches_up=True)])
    for _ in range(40):
        speculator.propose([request], 100)
        if speculator.is_watching:
            speculator.learn(plain, [[SampledToken(5)]], 0.25, has_waited=False)
    assert drafter.num_looks < 20
    drafter.proposal = Proposal([7, 8, 9], 3)
    drafts = next(filter(None, (speculator.propose([request], 100) for _ in range(100))))
    draft = tuple(drafts[request])
    entry = ScheduledRequest(request, 109, 1 + len(draft), catches_up=True, draft=draft)
    batch = ScheduledBatch([entry])
    speculator.complete(batch)
    # The first such step is slow, so it seems to lose.
    speculator.learn(batch, [[SampledToken(each) for each in sampled]], 0.75, has_waited=False)
    before = drafter.num_looks
    speculator.propose([request], 100)
    assert drafter.num_looks - before == looks


def test_where_steps_overlap_ids_are_waited_for_rarely_unless_drafts_hold() -> None:
    speculator = new_speculator()
    waits = sum(speculator.wants_ids() for _ in range(480))
    assert 480 / 30 < waits < 480 / 20


class SetHead(Oracle):
    """Drafts as a head does: each token is right with the same chance, and looks are not cheap."""

    @property
    def is_cheap(self) -> bool:
        return False

    def __init__(self, answers: Callable[[Request], Sequence[int]], chance: float) -> None:
        super().__init__(answers, 0.0)
        self._chance = chance

    def propose(self, request: Request, count: int) -> Proposal | None:
        said = request.num_generated_tokens
        own = [*self.answer(request)[said : said + count]]
        own += [0] * (count - len(own))
        is_right = [self.random.random() < self._chance for _ in own]
        return Proposal([t if ok else -2 for t, ok in zip(own, is_right, strict=True)], 0)


def answers_of(texts: list[tuple[list[int], list[int]]]) -> Callable[[Request], list[int]]:
    """Gives the answer to a request's prompt."""
    by_prompt = {tuple(prompt): answer for prompt, answer in texts}
    return lambda request: by_prompt[tuple(request.token_ids[: request.num_prompt_tokens])]


def head_speculator(
    texts: list[tuple[list[int], list[int]]], chance: float, *others: Proposer
) -> Speculator:
    """`others`: who else proposes, whose times of steps without drafts it shares."""
    plain = StepTimes()
    shared = [each._replace(lengths=each.lengths.fresh(plain)) for each in others]
    lengths = DraftLengths(4, plain, has_matches=False)
    head = Proposer("head", SetHead(answers_of(texts), chance), lengths)
    return Speculator([*shared, head], 15, lambda: 0.0)


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("chance", [0.5, 0.7, 0.9])
@pytest.mark.parametrize("token_share", [0.02, 0.1, 0.25])
def test_a_head_of_a_set_acceptance_gains_what_theory_gives(
    chance: float, token_share: float, batch: int
) -> None:
    """Drafts of the best length: (1 + p + … + p^D) / (1 + the share of each row and token · D)."""
    row_share = 0.01
    texts = [(random_text(i, 50), random_text(100 + i, 3000)) for i in range(batch)]
    base = 1e-3 * (1 + row_share * batch)
    found = simulate(
        head_speculator(texts, chance),
        texts,
        lambda rows: 1e-3 * (1 + row_share * rows),
        token_share * 1e-3,
    )
    best = max(
        sum(chance**i for i in range(count + 1))
        * base
        / (1e-3 * (1 + row_share * batch * (1 + count) + token_share * count))
        for count in range(1 + min(15, MAX_DRAFTED_TOKENS // batch))
    )
    # Until it is learned, and for steps without drafts; where little is gained, more than MARGIN.
    assert found.speedup > min(0.95 * best, max(0.98, best / MARGIN - 0.05)), (found.speedup, best)
    assert found.speedup < 1.05 * best


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("token_share", [0.02, 0.1, 0.25])
def test_a_useless_head_costs_at_most_two_percent(token_share: float, batch: int) -> None:
    texts = [(random_text(i, 50), random_text(100 + i, 3000)) for i in range(batch)]
    found = simulate(
        head_speculator(texts, 0.0), texts, MACHINES["arithmetic"], token_share * 18e-3
    )
    assert found.speedup > 0.98


class SlowAtFirst:
    """A machine whose caches hold what the last steps needed: the first step with drafts, and the
    first two without them, take longer than the next ones of their kind.
    """

    def __init__(self, batch: int) -> None:
        self._batch, self._kind, self._count = batch, False, 2

    def __call__(self, rows: int) -> float:
        kind = rows > self._batch
        self._count = self._count + 1 if kind == self._kind else 0
        self._kind = kind
        is_slow = self._count < (1 if kind else 2)
        return 1e-3 * (1 + 0.1 * rows) * (1.4 if is_slow else 1)


@pytest.mark.parametrize("chance", [0.0, 0.4, 0.5, 0.6, 0.7, 0.9])
@pytest.mark.parametrize("token_share", [0.1, 0.3, 0.6])
def test_steps_that_are_slower_after_others_of_another_kind_do_not_mislead(
    token_share: float, chance: float
) -> None:
    texts = [(random_text(1, 50), random_text(100, 3000))]
    speculator = head_speculator(texts, chance)
    found = simulate(speculator, texts, SlowAtFirst(1), token_share * 1e-3)
    best = max(
        sum(chance**i for i in range(count + 1)) * 1.1 / (1.1 + (0.1 + token_share) * count)
        for count in range(16)
    )
    least = max(0.975, min(0.95 * best, best / MARGIN - 0.05))
    assert found.speedup > least, (found.speedup, best)


class SlowAfterDrafts:
    """A machine on which steps without drafts are slow at first after those with them, as pocket's
    are on two threads of one core, and on which the first steps of all are slow.
    """

    def __init__(self, token: float) -> None:
        """`token`: what a drafted token takes; a step without any takes 1 in the long run."""
        self._token, self._since, self._count = token, 100, 0

    def __call__(self, rows: int) -> float:
        self._count += 1
        self._since = 0 if rows > 1 else self._since + 1
        cold = 3.0 if self._count <= 2 else 1.0
        drafted = 1 + self._token * (rows - 1)
        return 1e-3 * cold * (drafted if rows > 1 else 1 + 0.6 * 0.85**self._since)


@pytest.mark.parametrize(("chance", "token"), [(0.75, 0.2), (0.75, 0.5), (0.75, 1.0), (0.5, 0.5)])
def test_drafts_are_compared_with_steps_as_they_are_if_nobody_drafts(
    chance: float, token: float
) -> None:
    texts = [(random_text(1, 50), random_text(100, 6000))]
    found = simulate(head_speculator(texts, chance), texts, SlowAfterDrafts(token), 0.0)
    best = max(sum(chance**i for i in range(n + 1)) / (1 + token * n) for n in range(16))
    assert found.speedup > max(0.975, 0.95 * best), (found.speedup, best)


class Wandering:
    """A shared machine: all steps are slower for some 150 of them, and a little slower after a
    change of kind. A drafted token of each of `batch` requests takes `token`.
    """

    def __init__(self, batch: int, token: float, seed: int) -> None:
        self._batch, self._token, self._random = batch, token, Random(seed)
        self._left, self._slowness, self._is_drafting = 0.0, 1.0, False
        # What each step would have taken, had the machine not wandered.
        self.steps = list[float]()

    def __call__(self, rows: int) -> float:
        if self._left <= 0:
            self._left = self._random.expovariate(1 / 150)
            self._slowness = self._random.choice([1, 1, 1.1, 1.25, 1.35])
        self._left -= 1
        is_drafting = rows > self._batch
        changes, self._is_drafting = is_drafting != self._is_drafting, is_drafting
        longer = rows / self._batch - 1
        step = 1 + (self._token if is_drafting else 0.6) * longer + 0.15 * changes
        self.steps.append(step)
        noise = self._random.gauss(1, 0.03) * (1.4 if self._random.random() < 0.05 else 1)
        return 1e-3 * step * self._slowness * noise


@pytest.mark.parametrize(
    ("batch", "chance", "token", "least"),
    [(1, 0.6, 0.3, 1.15), (1, 0.0, 0.3, 0.98), (16, 0.6, 0.62, 0.98), (16, 0.45, 0.45, 0.98)],
)
def test_a_machine_whose_speed_wanders_does_not_mislead(
    batch: int, chance: float, token: float, least: float
) -> None:
    """As a process that answers one batch after the other: 20 times 100 tokens."""
    speedups, answers = [], dict[tuple[int, ...], list[int]]()
    head = SetHead(lambda request: answers[tuple(request.token_ids[:20])], chance)
    for seed in (0, 2):
        machine, plain = Wandering(batch, token, seed), StepTimes()
        taken = 0.0
        lengths = DraftLengths(4, plain, has_matches=False)
        speculator = Speculator([Proposer("head", head, lengths)], 15, lambda: 0.0)
        for i in range(20):
            seeds = [1000 * seed + 20 * i + k for k in range(batch)]
            texts = [(random_text(k, 20), random_text(10**6 + k, 100)) for k in seeds]
            answers |= {tuple(prompt): answer for prompt, answer in texts}
            speculator = speculator.renewed()
            machine.steps.clear()
            found = simulate(speculator, texts, machine)
            taken += sum(machine.steps[1 : 1 + found.num_steps])
        speedups.append(20 * 99 / taken)
    assert min(speedups) > least, speedups


def test_steps_that_something_else_makes_slow_do_not_stop_drafts() -> None:
    """One in fifty takes thirty times as long, whatever it computes."""
    texts, random = [(random_text(1, 50), random_text(100, 6000))], Random(3)

    def seconds(rows: int) -> float:
        return 1e-3 * (1 + 0.1 * rows) * (30 if random.random() < 0.02 else 1)

    chance, token_share = 0.7, 0.2
    found = simulate(head_speculator(texts, chance), texts, seconds, token_share * 1e-3)
    best = max(
        sum(chance**i for i in range(count + 1)) * 1.1 / (1.1 + (0.1 + token_share) * count)
        for count in range(16)
    )
    assert found.speedup > 0.92 * best, (found.speedup, best)


def test_a_useless_head_does_not_keep_n_grams_from_a_copied_text() -> None:
    """Looks at both cost nothing here, and neither do n-grams."""
    texts = [(text := random_text(1, 2000), edited(text, 5))]
    alone = simulate(new_speculator(), texts, MACHINES["bandwidth"])
    n_grams = Proposer("n-grams", NgramDrafter(2, 8), DraftLengths(9))
    both = simulate(head_speculator(texts, 0.0, n_grams), texts, MACHINES["bandwidth"], 1e-4)
    alone_too = simulate(new_speculator(), texts, MACHINES["bandwidth"], 1e-4)
    assert alone.speedup > alone_too.speedup > 2
    assert both.speedup > 0.95 * alone_too.speedup


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
    runner: Any = KnowingHead(texts[0][1], chance)
    cache: Any = Blocks()
    head = HeadDrafter(runner, cache, [0], 1, 1 << 15, 2048)
    plain = StepTimes()
    proposers = [Proposer("head", head, DraftLengths(4, plain, has_matches=False))]
    if has_ngrams:
        proposers.insert(0, Proposer("n-grams", NgramDrafter(2, 8), DraftLengths(9, plain)))
    speculator = Speculator(proposers, 15, lambda: 0.0)
    found = simulate(
        speculator,
        texts,
        lambda rows: 1e-3 * (1 + 0.002 * rows),
        5e-5,
        overlaps=True,
        wait_seconds=2e-4,
    )
    assert found.num_tokens >= 2499
    assert found.speedup > least, found


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
    n_grams, drafter = NgramDrafter(2, 8), new(ColdRunner(2), Blocks())
    proposers = [Proposer("test", each, DraftLengths(9)) for each in (n_grams, drafter)]
    speculator = Speculator(proposers, 15)
    seen = [(speculator.is_warm, speculator.work_ahead()) for _ in range(3)]
    assert seen == [(False, True), (False, True), (True, False)]


class LateHead(SetHead):
    """Useless up to a token of the answer, and then nearly always right."""

    def __init__(self, answers: Callable[[Request], Sequence[int]], first_right: int) -> None:
        super().__init__(answers, 0.0)
        self._first_right = first_right

    def propose(self, request: Request, count: int) -> Proposal | None:
        self._chance = 0.0 if request.num_generated_tokens < self._first_right else 0.9
        return super().propose(request, count)


def test_a_head_that_was_useless_for_long_is_tried_again() -> None:
    texts = [(random_text(1, 50), random_text(100, 12_000))]
    head = LateHead(lambda request: texts[0][1], 6000)
    lengths = DraftLengths(4, has_matches=False)
    speculator = Speculator([Proposer("head", head, lengths)], 15, lambda: 0.0)
    found = simulate(speculator, texts, lambda rows: 1e-3 * (1 + 0.01 * rows), 1e-5)
    # Half of the tokens one by one, the others at least three at a time, once that is noticed.
    assert found.num_steps < 6000 + 2048 + 6000 / 3, found


def test_in_a_batch_a_trial_tells_what_a_token_of_each_request_costs() -> None:
    # A pass of the head takes a quarter of a step: three tokens of one request take three passes.
    texts = [(random_text(i, 50), random_text(100 + i, 3000)) for i in range(8)]
    head = LateHead(answers_of(texts), 1500)
    lengths = DraftLengths(4, has_matches=False)
    speculator = Speculator([Proposer("head", head, lengths)], 15, lambda: 0.0)
    found = simulate(speculator, texts, lambda rows: 1e-3 * (1 + 0.01 * rows), 2.5e-4)
    assert found.num_steps < 1500 + 768 + 750 / 1.9, found


class UnreadyHead(SetHead):
    """Has to be prepared for each request, one in a step."""

    def __init__(self, answers: Callable[[Request], Sequence[int]], chance: float) -> None:
        super().__init__(answers, chance)
        self._ready, self._unready = set[Request](), list[Request]()
        # The requests that each step has drafted for, of those with any; and how it was prepared.
        self.drafted: list[int] = []
        self.as_trial: list[bool] = []

    def propose(self, request: Request, count: int) -> Proposal | None:
        proposal = super().propose(request, count)
        is_ready = request in self._ready
        return None if proposal is None else proposal._replace(is_ready=is_ready)

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
    head = UnreadyHead(answers_of(texts), 0.0)
    lengths = DraftLengths(4, has_matches=False)
    speculator = Speculator([Proposer("head", head, lengths)], 15, lambda: 0.0)
    # Beside the drafts of eight rows a step takes twice the time: nobody drafts unless to try.
    simulate(speculator, texts, lambda rows: 1e-3 * max(1.0, rows / 8), 0.0)
    assert head.drafted == [8] * 3


@pytest.mark.parametrize(
    ("every", "decided", "is_known"), [(1000, 48, True), (1000, 24, False), (10, 48, False)]
)
def test_a_head_that_is_always_wrong_need_not_be_timed(
    every: int, decided: int, is_known: bool
) -> None:
    """One that is right at times is tried until it is known what its drafts cost."""
    lengths, history = DraftLengths(4, has_matches=False), DraftHistory()
    assert not lengths.knows_enough(16)
    for i in range(decided):
        lengths.add_outcome(history, 0, 1, int(i % every == every - 1))
    assert lengths.knows_enough(16) == is_known


def test_a_head_of_which_little_is_known_is_prepared_with_little() -> None:
    texts = [(random_text(i, 50), random_text(100 + i, 300)) for i in range(2)]
    head = UnreadyHead(answers_of(texts), 1.0)
    proposer = Proposer("head", head, DraftLengths(4, has_matches=False))
    speculator = Speculator([proposer], 15, lambda: 0.0)
    for text in texts:
        simulate(speculator, [text], lambda rows: 1e-3 * (1 + 0.01 * rows), 1e-4)
    assert head.as_trial[0]
    assert not head.as_trial[-1]


def test_an_unlikely_drafter_does_not_keep_another_from_drafting() -> None:
    texts = [(random_text(1, 50), random_text(100, 6000))]
    never = Proposer("n-grams", Oracle(lambda request: [1] * 9000, 1.0), DraftLengths(9))
    both = head_speculator(texts, 0.5, never)
    machine, token = (lambda rows: 1e-3 * (1 + 0.01 * rows)), 1e-4
    alone = simulate(head_speculator(texts, 0.5), texts, machine, token)
    found = simulate(both, texts, machine, token)
    assert alone.speedup > 1.3
    assert found.speedup > 0.95 * alone.speedup, (found, alone)


def test_a_rest_of_a_drafter_that_copies_is_short() -> None:
    """Its steps are watched, though nobody looks for drafts in them."""
    prompt = random_text(1, 400)
    texts = [(prompt, 30 * prompt)]
    speculator = new_speculator()
    found = simulate(speculator, texts, lambda rows: 1e-3 * (1 + 0.01 * rows), 5e-5)
    # All drafts have fifteen tokens but the first ones, so it rests once.
    assert 12_000 / 16 < found.num_steps < 12_000 / 16 + 20


class WatchedHead(HeadDrafter):
    """Counts what it is shown, and how often it is asked."""

    num_seen = num_asked = 0

    def see(self, batch: ScheduledBatch, hidden: Sequence[torch.Tensor]) -> None:
        self.num_seen += 1
        super().see(batch, hidden)

    def propose(self, request: Request, count: int) -> Proposal | None:
        self.num_asked += 1
        return super().propose(request, count)


def test_a_useless_head_is_left_alone_between_its_trials() -> None:
    texts = [(random_text(1, 40), random_text(2, 6000))]
    runner: Any = KnowingHead(texts[0][1], 0.0)
    cache: Any = Blocks()
    head = WatchedHead(runner, cache, [0], 1, 1 << 15, 2048)
    proposers = [Proposer("head", head, DraftLengths(4, has_matches=False))]
    speculator = Speculator(proposers, 15, lambda: 0.0)
    found = simulate(speculator, texts, lambda rows: 1e-3 * (1 + 0.1 * rows), 5e-5)
    assert found.num_steps > 5900
    assert head.num_asked < 0.06 * found.num_steps, head.num_asked
    assert head.num_seen < 0.25 * found.num_steps, head.num_seen


def test_a_head_is_not_asked_while_text_is_copied() -> None:
    prompt = random_text(1, 400)
    texts = [(prompt, 5 * prompt)]
    runner: Any = KnowingHead(texts[0][1], 1.0)
    cache: Any = Blocks()
    head = WatchedHead(runner, cache, [0], 1, 1 << 15, 4096)
    ngrams = Proposer("n-grams", NgramDrafter(2, 8), DraftLengths(9))
    behind = Proposer("head", head, DraftLengths(4, has_matches=False))
    speculator = Speculator([ngrams, behind], 15, lambda: 0.0)
    found = simulate(speculator, texts, lambda rows: 1e-3 * (1 + 0.01 * rows), 5e-5)
    assert found.speedup > 8
    assert head.num_asked < 0.15 * found.num_steps, head.num_asked
