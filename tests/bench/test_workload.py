"""The drawn requests: their means, their bounds, and that a rate changes nothing but the times."""

from dataclasses import replace
from statistics import mean

from localllm.bench.workload import Mix


def test_lengths_have_the_asked_means_and_stay_in_bounds() -> None:
    requests = Mix(num_requests=4000, mean_prompt=100, mean_new=50, longest=4).draw()
    prompts = [len(request.prompt) for request in requests]
    # An exponential cut at 4 times its mean has 1 - e^-4 of it; three standard errors are 5 %.
    assert 93 < mean(prompts) < 103
    assert 46 < mean(request.num_new for request in requests) < 52
    assert min(prompts) >= 1
    assert max(prompts) <= 400
    assert max(len(request.prompt) + request.num_new for request in requests) <= 600


def test_arrivals_keep_the_rate_and_the_requests_are_the_same_at_any() -> None:
    mix = Mix(num_requests=2000)
    slow, fast, at_once = mix.draw(2.0), mix.draw(4.0), mix.draw()
    assert 1900 / 2 < slow[-1].arrival_s < 2140 / 2  # three standard errors are 7 %
    assert [each.arrival_s for each in fast] == [each.arrival_s / 2 for each in slow]
    assert {each.arrival_s for each in at_once} == {0.0}
    assert [replace(each, arrival_s=0.0) for each in slow] == at_once


def test_a_mix_fits_into_a_small_context() -> None:
    assert Mix.within(512, 300, 0).max_tokens <= 510
    assert Mix.within(100_000, 300, 0).max_tokens == Mix().max_tokens
