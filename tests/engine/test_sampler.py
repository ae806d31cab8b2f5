"""Filters with values to check by hand; the noise; the distribution that comes out."""

import math

import pytest
import torch
from scheduling import caught_up

from localllm.engine.sampler import (
    apply_penalties,
    filter_min_p,
    filter_top_k,
    filter_top_p,
    noise_key,
    sample_seed,
    sample_tokens,
)
from localllm.schedule.request import Request
from localllm.schedule.sampling_params import SamplingParams
from localllm_kernels import TORCH_OPS
from localllm_kernels.sampling.gumbel_argmax import gumbel_noise

LOGITS = torch.tensor([1.0, 3.0, 2.0, 3.0])
# Probabilities a half, a quarter, an eighth, an eighth.
HALVES = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()


def make_request(params: SamplingParams, token_ids: list[int], num_prompt: int = 1) -> Request:
    return Request(
        request_id=0,
        sample=0,
        num_prompt_tokens=num_prompt,
        token_ids=token_ids,
        params=params,
        seed=sample_seed(params.seed or 0, 0),
        stop_token_ids=frozenset(),
        max_total_tokens=1000,
    )


def test_top_k_keeps_the_k_largest_and_ties_with_the_last() -> None:
    assert filter_top_k(LOGITS, 1).tolist() == [False, True, False, True]
    assert filter_top_k(LOGITS, 3).tolist() == [False, True, True, True]
    assert filter_top_k(LOGITS, 9).all()


@pytest.mark.parametrize(
    ("p", "kept"), [(0.4, 1), (0.5, 1), (0.51, 2), (0.75, 2), (0.76, 4), (1.0, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_p(p: float, kept: int) -> None:
    assert filter_top_p(HALVES, p).sum() == kept


def test_top_p_looks_beyond_its_first_look() -> None:
    uniform = torch.zeros(1000)
    uniform[:600] += torch.linspace(0.001, 0.002, 600)  # no ties among the likeliest
    kept = int(filter_top_p(uniform, 0.5).sum())
    assert kept == 500


def test_min_p_keeps_what_is_near_the_likeliest() -> None:
    assert filter_min_p(HALVES, 0.5).tolist() == [True, True, False, False]
    assert filter_min_p(HALVES, 0.6).tolist() == [True, False, False, False]


def test_penalties_by_hand() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias={2: 10.0}
    )
    logits = torch.tensor([4.0, -4.0, 1.0, 1.0])
    result = apply_penalties(logits, params, prompt=[0, 1], generated=[3, 3])
    # 0: 4/2; 1: -4*2; 2: 1+10; 3: 1/2 - 0.5 - 2*0.25
    assert result.tolist() == [2.0, -8.0, 11.0, -0.5]
    assert logits.tolist() == [4.0, -4.0, 1.0, 1.0]


def test_greedy_takes_the_first_of_equal_maxima() -> None:
    request = make_request(SamplingParams(temperature=0), [0])
    [[sampled]] = sample_tokens(LOGITS.unsqueeze(0), [caught_up(request)], TORCH_OPS)
    assert sampled.token_id == 1


def test_noise_is_a_function_of_seed_position_and_token_alone() -> None:
    ids = torch.arange(100)
    whole = gumbel_noise(noise_key(1, 5), ids)
    assert torch.equal(whole[20:30], gumbel_noise(noise_key(1, 5), ids[20:30]))
    assert torch.equal(whole.flip(0), gumbel_noise(noise_key(1, 5), ids.flip(0)))
    assert not torch.equal(whole, gumbel_noise(noise_key(2, 5), ids))
    assert not torch.equal(whole, gumbel_noise(noise_key(1, 6), ids))


def test_noise_has_the_mean_and_variance_of_gumbel() -> None:
    noise = torch.cat(
        [gumbel_noise(noise_key(seed, 3), torch.arange(50_000)) for seed in range(20)]
    )
    # A million draws: three standard errors are 0.004 and about 0.02.
    assert abs(noise.mean().item() - 0.577216) < 0.004
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    assert noise.isfinite().all()


def test_noise_does_not_correlate_between_neighbouring_positions_seeds_and_tokens() -> None:
    ids = torch.arange(100_000)
    base = gumbel_noise(noise_key(7, 100), ids)
    for other in (
        gumbel_noise(noise_key(7, 101), ids),
        gumbel_noise(noise_key(8, 100), ids),
        gumbel_noise(noise_key(7, 100), ids + 1),
    ):
        correlation = torch.corrcoef(torch.stack((base, other)))[0, 1].item()
        assert abs(correlation) < 0.01  # three standard errors of 100,000 pairs


def test_sampled_frequencies_are_the_softmax() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]])
    counts = torch.zeros(4)
    num_draws = 4000
    for seed in range(num_draws):
        request = make_request(SamplingParams(temperature=0.8, seed=seed), [0, 1, 2])
        [[sampled]] = sample_tokens(logits, [caught_up(request)], TORCH_OPS)
        assert sampled.token_id is not None
        counts[sampled.token_id] += 1
    expected = torch.softmax(logits[0] / 0.8, 0) * num_draws
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 16.3  # three degrees of freedom, one in a thousand


def test_logprobs_are_of_the_distribution_before_any_filter() -> None:
    params = SamplingParams(temperature=0.1, top_k=1, logprobs=2)
    entry = caught_up(make_request(params, [0]))
    [[sampled]] = sample_tokens(HALVES.unsqueeze(0), [entry], TORCH_OPS)
    assert sampled.logprobs is not None
    assert sampled.token_id == 0
    assert sampled.logprobs.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [token_id for token_id, _ in sampled.logprobs.top] == [0, 1]
    assert sampled.logprobs.top[1][1] == pytest.approx(math.log(0.25), abs=1e-6)


def test_a_row_that_is_not_finite_gives_no_token() -> None:
    logits = torch.stack((LOGITS, torch.tensor([1.0, math.nan, 0.0, 0.0])))
    request = make_request(SamplingParams(temperature=0), [0])
    sampled = sample_tokens(logits, 2 * [caught_up(request)], TORCH_OPS)
    assert [token.token_id for [token] in sampled] == [1, None]


def test_samples_have_different_seeds_and_seed_0_is_not_special() -> None:
    seeds = {sample_seed(seed, sample) for seed in range(50) for sample in range(8)}
    assert len(seeds) == 400
    assert 0 not in seeds
