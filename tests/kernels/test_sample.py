"""The batch's sampling kernel under Triton's interpreter against the sampler's row by row."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from guards import GuardedMemory, needs_interpreter
from scheduling import caught_up
from torch import Tensor

from localllm.engine.sampler import noise_key, sample_tokens
from localllm.engine.slots import noise_keys
from localllm.schedule.request import Request
from localllm.schedule.sampling_params import SamplingParams
from localllm_kernels import TORCH_OPS
from localllm_kernels.sampling.sample import (
    Biases,
    Drafts,
    Penalties,
    SamplingRows,
    sample_reference,
)
from localllm_kernels.sampling.sample_launch import KEPT, WIDTH, sample

pytestmark = needs_interpreter

FILTERS = list(itertools.product([0, 1, 7, 5000], [1.0, 0.9, 0.3, 1e-6], [0.0, 0.05, 1.0]))


def request(index: int, params: SamplingParams) -> Request:
    return Request(
        request_id=index,
        sample=0,
        num_prompt_tokens=3,
        token_ids=[1, 2, 3, 2, 4, 4],
        params=params,
        seed=index * 0x9E3779B97F4A7C15 % (1 << 64),
        stop_token_ids=frozenset(),
        max_total_tokens=100,
        parent=None,
    )


def rows_of(requests: list[Request], vocab: int, has_penalties: bool) -> SamplingRows:
    """Slots in the order opposite to that of the rows."""
    params = [each.params for each in requests]
    keys = [noise_key(each.seed, each.num_tokens) for each in requests]
    count = len(requests)
    rows = SamplingRows(
        torch.arange(count - 1, -1, -1, dtype=torch.int32),
        torch.full((count,), 77),
        torch.tensor([each.temperature for each in params]),
        torch.tensor([each.top_k for each in params], dtype=torch.int32),
        torch.tensor([each.top_p for each in params]),
        torch.tensor([each.min_p for each in params]),
        torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys]),
    )
    if not has_penalties:
        return rows
    counts = torch.zeros(count, vocab, dtype=torch.int32)
    for slot, each in zip(rows.slots, requests, strict=True):
        for i, token in enumerate(each.token_ids):
            counts[slot, token] += 2
            if i < each.num_prompt_tokens:
                counts[slot, token] -= 2
                counts[slot, token] |= 1
    factors = [[e.repetition_penalty, e.presence_penalty, e.frequency_penalty] for e in params]
    biases = [each.logit_bias for each in params]
    starts = [0, *itertools.accumulate(len(each) for each in biases)]
    return replace(
        rows,
        penalties=Penalties(counts, torch.tensor(factors)),
        biases=Biases(
            torch.tensor(starts, dtype=torch.int32),
            torch.tensor([token for each in biases for token in each], dtype=torch.int32),
            torch.tensor([value for each in biases for value in each.values()]),
        ),
    )


def guarded(rows: SamplingRows, memory: GuardedMemory) -> SamplingRows:
    """Its tables between guards."""
    penalties = rows.penalties
    if penalties is not None:
        penalties = replace(penalties, counts=memory.guarded(penalties.counts))
    return replace(rows, newest=memory.guarded(rows.newest), penalties=penalties)


def check(logits: Tensor, requests: list[Request], has_penalties: bool = False) -> None:
    entries = [caught_up(each) for each in requests]
    expected = [token.token_id for [token] in sample_tokens(logits, entries, TORCH_OPS)]
    rows = rows_of(requests, logits.shape[1], has_penalties)
    with GuardedMemory() as memory:
        own = guarded(rows, memory)
        found = sample(memory.guarded(logits), own)
    memory.check()
    assert torch.equal(found, sample_reference(logits, rows))
    assert [None if id_ < 0 else id_ for id_ in found.tolist()] == expected
    # What is booked: the token of each slot, and that it was generated once more.
    assert torch.equal(own.newest, found.flip(0).clamp(min=0))
    assert torch.equal(own.newest, rows.newest)
    if own.penalties is not None and rows.penalties is not None:
        assert torch.equal(own.penalties.counts, rows.penalties.counts)


@pytest.mark.parametrize(
    ("vocab", "every"),
    # Every seventh has each of the values.
    [(300, 1), (2500, 7), pytest.param(2500, 1, marks=pytest.mark.slow)],
)
def test_every_filter_draws_what_the_sampler_draws(vocab: int, every: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    requests = [
        request(i, SamplingParams(temperature=0.2 + i % 5 / 3, top_k=k, top_p=p, min_p=m))
        for i, (k, p, m) in enumerate(FILTERS[::every])
    ]
    check(3 * torch.randn(len(requests), vocab, generator=generator), requests)


@pytest.mark.parametrize("spread", [0.0, 0.02, 3.0])
def test_more_blocks_than_are_kept(spread: float) -> None:
    """Flat rows, where passes are over the whole row, and steep ones; and ties at the border."""
    generator = torch.Generator().manual_seed(8)
    vocab = 2 * KEPT * WIDTH + 77
    chosen = [
        {"top_k": 20},
        {"top_k": 20, "top_p": 0.95},
        {"top_k": 3 * KEPT, "top_p": 0.9},
        {"top_p": 0.9},
        {"top_p": 0.2, "min_p": 0.3},
        {"min_p": 0.05},
        {},
    ]
    requests = [
        request(i, SamplingParams(temperature=0.9, **each)) for i, each in enumerate(chosen)
    ]
    logits = spread * torch.randn(len(requests), vocab, generator=generator)
    check(logits, requests)


@pytest.mark.parametrize("num_left", [1, 3, 200])
def test_what_a_grammar_leaves_of_a_large_vocabulary(num_left: int) -> None:
    generator = torch.Generator().manual_seed(num_left)
    vocab = 3 * KEPT * WIDTH
    logits = torch.full((4, vocab), -torch.inf)
    left = torch.randperm(vocab, generator=generator)[:num_left]
    logits[:, left] = torch.randn(4, num_left, generator=generator)
    chosen = ({"top_k": 20}, {"top_p": 0.5}, {"top_k": 2, "top_p": 0.9}, {"min_p": 0.5})
    check(logits, [request(i, SamplingParams(temperature=0.7, **e)) for i, e in enumerate(chosen)])


def test_greedy_takes_the_first_of_the_greatest() -> None:
    logits = torch.zeros(3, 2100)
    logits[1, [1500, 7, 2000]] = 2.0
    logits[2] = -torch.inf
    logits[2, 2099] = -5.0
    check(logits, [request(i, SamplingParams(temperature=0.0)) for i in range(3)])


def test_ties_with_the_last_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 2.0, -1.0, -torch.inf]]).repeat(12, 1)
    params = SamplingParams(temperature=2.0, top_k=3)
    check(logits, [request(i, params) for i in range(12)])
    params = SamplingParams(temperature=1.0, top_p=0.7)
    check(logits, [request(i, params) for i in range(12)])


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_that_is_not_finite_disturbs_no_other(bad: float) -> None:
    logits = torch.randn(4, 50)
    logits[1, 49], logits[2] = bad, -torch.inf
    check(logits, [request(i, SamplingParams(temperature=1.0)) for i in range(4)])


def test_penalties_and_biases() -> None:
    generator = torch.Generator().manual_seed(5)
    chosen = [
        SamplingParams(temperature=t, **penalties)
        for t in (0.0, 0.9)
        for penalties in (
            {},
            {"repetition_penalty": 1.7},
            {"presence_penalty": 1.5},
            {"frequency_penalty": 0.8, "presence_penalty": -1.0},
            {"logit_bias": {2: 6.0, 39: -100.0, 7: 3.0}},
            {"repetition_penalty": 0.6, "frequency_penalty": 2.0, "logit_bias": {4: 5.0, 30: 4.5}},
        )
    ]
    requests = [request(i, params) for i, params in enumerate(8 * chosen)]
    logits = 2 * torch.randn(len(requests), 40, generator=generator)
    logits[:, :6] += 2  # the tokens that are there already
    check(logits, requests, has_penalties=True)
    without = [request(i, SamplingParams(temperature=0.9)) for i in range(len(requests))]
    drawn = [sample_reference(logits, rows_of(each, 40, True)) for each in (requests, without)]
    assert not torch.equal(*drawn)


def test_a_row_without_a_slot_is_left_alone() -> None:
    logits = torch.randn(3, 40)
    requests = [request(i, SamplingParams(temperature=0.9)) for i in range(3)]
    rows = rows_of(requests, 40, True)
    rows.slots[1] = -1
    before = logits[1].clone()
    found = sample(logits, rows)
    assert found.ge(0).tolist() == [True, False, True]
    assert rows.newest.tolist() == [found[2], 77, found[0]]
    assert torch.equal(logits[1], before)


def test_keys_of_many_are_those_of_each() -> None:
    seeds = [0, 1, (1 << 64) - 1, 0x9E3779B97F4A7C15]
    positions = [0, 7, 1 << 40, (1 << 63) + 5]
    expected = [noise_key(*each) for each in zip(seeds, positions, strict=True)]
    found = noise_keys(np.array(seeds, np.uint64), np.array(positions, np.uint64))
    assert found.tolist() == expected


def test_a_draft_is_drawn_and_counted_as_if_it_came_token_by_token() -> None:
    generator = torch.Generator().manual_seed(8)
    depth, vocab = 4, 12
    chosen = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=0.0, frequency_penalty=1.9),
        SamplingParams(temperature=0.9, repetition_penalty=1.8, presence_penalty=1.0),
    ]
    requests = [request(i, params) for i, params in enumerate(4 * chosen)]
    logits = torch.randn(len(requests) * (depth + 1), vocab, generator=generator)
    logits[:, 5] += 1.5  # one that comes again and again, until penalties are against it
    own = logits.view(len(requests), depth + 1, vocab)
    entries, expected = [], []
    for i, each in enumerate(requests):
        tokens: list[int] = []
        for _ in range(depth + 1):
            # Each alone, behind what was drawn before it.
            behind = replace(each, token_ids=[*each.token_ids, *tokens])
            [[drawn]] = sample_tokens(own[i, len(tokens)][None], [caught_up(behind)], TORCH_OPS)
            assert drawn.token_id is not None
            tokens.append(drawn.token_id)
        wrong = i % (depth + 1)  # where the draft errs; in some requests nowhere
        draft = [(t + (j == wrong)) % vocab for j, t in enumerate(tokens[:depth])]
        entries.append(caught_up(each, draft))
        expected.append(tokens[: min(wrong, depth) + 1])
    found = sample_tokens(logits, entries, TORCH_OPS)
    assert [[token.token_id for token in each] for each in found] == expected

    repeated = [
        replace(each, token_ids=[*each.token_ids, *range(i)])  # only the key goes by it
        for each in requests
        for i in range(depth + 1)
    ]
    rows = rows_of(repeated, vocab, has_penalties=False)
    slots = torch.arange(len(requests), dtype=torch.int32).flip(0)
    plain = rows_of(requests, vocab, has_penalties=True)
    assert plain.penalties is not None
    drafts = torch.tensor([[*entry.draft, -1] for entry in entries], dtype=torch.int32)
    rows = replace(
        rows,
        slots=slots.repeat_interleave(depth + 1),
        newest=torch.full((len(requests),), 77),
        penalties=Penalties(
            plain.penalties.counts, plain.penalties.factors.repeat_interleave(depth + 1, dim=0)
        ),
        drafts=Drafts(
            torch.arange(depth + 1, dtype=torch.int32).repeat(len(requests)), drafts.flatten()
        ),
    )
    copied = replace(
        rows,
        newest=rows.newest.clone(),
        penalties=replace(rows.penalties, counts=plain.penalties.counts.clone()),
    )
    with GuardedMemory() as memory:
        guarded_rows = guarded(rows, memory)
        ids = sample(memory.guarded(logits), guarded_rows)
    memory.check()
    assert torch.equal(ids, sample_reference(logits, copied))
    for i, tokens in enumerate(expected):
        assert ids.view(-1, depth + 1)[i, : len(tokens)].tolist() == tokens
        slot = int(slots[i])
        assert guarded_rows.newest[slot] == tokens[-1]
        assert guarded_rows.penalties is not None
        booked = guarded_rows.penalties.counts[slot] - plain.penalties.counts[slot]
        assert torch.equal(booked, 2 * torch.bincount(torch.tensor(tokens), minlength=vocab))
    assert torch.equal(guarded_rows.newest, copied.newest)
