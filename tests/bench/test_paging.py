"""Blocks counted on a schedule small enough to follow by hand."""

from localllm.bench.paging import MIX, count_usage
from localllm.bench.workload import Mix


def test_waste_is_what_the_last_blocks_leave_empty() -> None:
    # One request: a prompt of 3 tokens that gets 2. Two steps with 3 and 4 tokens, a block each.
    class One(Mix):
        def draw(self, rate: float | None = None):  # type: ignore[no-untyped-def]
            [request] = super().draw(rate)
            return [type(request)((1, 2, 3), 2)]

    usage = count_usage(One(num_requests=1), block_size=4, cache_tokens=64)
    assert usage.waste == 1 - (3 + 4) / (4 + 4)
    assert usage.mean_running == 1
    assert usage.mean_tokens == 3.5


def test_smaller_blocks_waste_less_and_more_memory_runs_more() -> None:
    mix = Mix(num_requests=60, mean_prompt=50, mean_new=25)
    small, large = (count_usage(mix, size, 1024) for size in (8, 32))
    assert small.waste < large.waste
    assert count_usage(mix, 8, 2048).mean_running > small.mean_running


def test_the_mix_has_about_500_tokens_in_the_cache() -> None:
    assert 400 < count_usage(MIX, 16, 65536).mean_tokens < 650
