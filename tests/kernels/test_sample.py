"""The batch's sampling kernel under Triton's interpreter against the sampler's row by row."""

import itertools

import pytest
import torch
from guards import GuardedMemory, needs_interpreter
from torch import Tensor

from localllm.config import SamplingParams
from localllm.engine.request import Request
from localllm.engine.sampler import (
    _list_penalties,
    _sample_together,
    noise_key,
    sample_tokens,
)
from localllm_kernels import TORCH_OPS
from localllm_kernels.sample import SamplingRows, sample, sample_reference

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


def rows_of(requests: list[Request]) -> SamplingRows:
    params = [each.params for each in requests]
    keys = [noise_key(each.seed, each.num_tokens) for each in requests]
    return SamplingRows(
        torch.tensor([each.temperature for each in params]),
        torch.tensor([each.top_k for each in params], dtype=torch.int32),
        torch.tensor([each.top_p for each in params]),
        torch.tensor([each.min_p for each in params]),
        torch.tensor([key - (1 << 64) if key >> 63 else key for key in keys]),
        _list_penalties(requests, torch.device("cpu")),
    )


def check(logits: Tensor, requests: list[Request]) -> None:
    expected = [each.token_id for each in sample_tokens(logits, requests, TORCH_OPS)]
    with GuardedMemory() as memory:
        found = sample(memory.guarded(logits), rows_of(requests))
        together = _sample_together(logits.clone(), requests, sample)
    memory.check()
    assert torch.equal(found, sample_reference(logits, rows_of(requests)))
    assert [each.token_id for each in together] == expected
    assert [None if id_ < 0 else id_ for id_ in found.tolist()] == expected


@pytest.mark.parametrize("vocab", [1, 5, 300, 2500])
def test_every_filter_draws_what_the_sampler_draws(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    requests = [
        request(i, SamplingParams(temperature=0.2 + i % 5 / 3, top_k=k, top_p=p, min_p=m))
        for i, (k, p, m) in enumerate(FILTERS)
    ]
    check(3 * torch.randn(len(requests), vocab, generator=generator), requests)


def test_greedy_takes_the_first_of_the_greatest() -> None:
    logits = torch.zeros(3, 2100)
    logits[1, [1500, 7, 2000]] = 2.0
    logits[2] = -torch.inf
    logits[2, 2099] = -5.0
    check(logits, [request(i, SamplingParams(temperature=0.0)) for i in range(3)])


def test_ties_with_the_last_are_kept() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0, 2.0, 2.0, -1.0, -torch.inf]]).repeat(40, 1)
    params = SamplingParams(temperature=2.0, top_k=3)
    check(logits, [request(i, params) for i in range(40)])
    params = SamplingParams(temperature=1.0, top_p=0.7)
    check(logits, [request(i, params) for i in range(40)])


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
    check(logits, requests)
    without = [request(i, SamplingParams(temperature=0.9)) for i in range(len(requests))]
    drawn = [sample_reference(logits, rows_of(each)) for each in (requests, without)]
    assert not torch.equal(*drawn)


def test_log_probabilities_are_those_before_penalties() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0, logprobs=2)
    requests, logits = [request(0, params)], torch.randn(1, 40)
    [expected] = sample_tokens(logits, requests, TORCH_OPS)
    [found] = _sample_together(logits.clone(), requests, sample)
    assert found == expected
