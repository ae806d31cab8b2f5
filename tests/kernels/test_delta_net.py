"""The gated delta rule gives the same bits whatever the steps and drafts; the C one what torch's
gives.
"""

from collections.abc import Callable

import pytest
import torch

from localllm.engine.loading import library_folder
from localllm_kernels import cpu_ops
from localllm_kernels.delta_net import DeltaHeads, DeltaWeights, delta_net_reference
from localllm_kernels.state_cache import StateCache, StateSave, StateSlots

HEADS = DeltaHeads(num_keys=2, num_values=6, key_width=24, value_width=40)
LENGTH, RING = 45, 9
Rule = Callable[..., torch.Tensor]
Rows = tuple[torch.Tensor, torch.Tensor]


@pytest.fixture(params=["torch", "C"])
def rule(request: pytest.FixtureRequest) -> Rule:
    return delta_net_reference if request.param == "torch" else cpu_ops(library_folder()).delta_net


def weights_of(heads: DeltaHeads, taps: int = 4) -> DeltaWeights:
    decay, bias = -torch.rand(heads.num_values), torch.randn(heads.num_values)
    norm = 1 + 0.2 * torch.randn(heads.value_width)
    return DeltaWeights(torch.randn(taps, heads.conv_width), decay, bias, norm, 1e-6)


def rows_of(heads: DeltaHeads, count: int) -> Rows:
    width = heads.conv_width + heads.num_values * heads.value_width
    return torch.randn(count, width), torch.randn(count, 2 * heads.num_values)


def part(rows: Rows, start: int, end: int) -> Rows:
    return rows[0][start:end], rows[1][start:end]


def cache_of(heads: DeltaHeads, slots: int, ring: int = RING, taps: int = 4) -> StateCache:
    """What a slot held before is not read."""
    rows = torch.full((slots, ring, heads.row_width), torch.nan)
    return StateCache(rows, taps - 1, torch.full((slots, *heads.matrix), torch.nan))


def step(
    rule: Rule,
    rows: Rows,
    start: int,
    weights: DeltaWeights,
    cache: StateCache,
    saves: tuple[StateSave, ...] = (),
) -> torch.Tensor:
    """One without drafts, of the request in slot 1."""
    end = start + len(rows[0])
    states = StateSlots((1,), (0, len(rows[0])), (start,), (start,), (end,), saves)
    return rule(*rows, weights, HEADS, cache, states)


@pytest.mark.parametrize("sizes", [[1] * LENGTH, [3, 1, 16, 2, 23], [7, 38], [17, 28]])
def test_steps_give_the_same_bits_as_the_whole(rule: Rule, sizes: list[int]) -> None:
    rows, weights = rows_of(HEADS, LENGTH), weights_of(HEADS)
    cache, found, start = cache_of(HEADS, 3), [], 0
    for size in sizes:
        found.append(step(rule, part(rows, start, start + size), start, weights, cache))
        start += size
    once = cache_of(HEADS, 2, ring=3)
    assert torch.cat(found).equal(step(rule, rows, 0, weights, once))
    assert cache.rows[[0, 2]].isnan().all()


@pytest.mark.parametrize("num_rows", [1, 16, 21, 35])
def test_a_copy_within_a_step_is_the_state_there(rule: Rule, num_rows: int) -> None:
    rows, weights = rows_of(HEADS, LENGTH), weights_of(HEADS)
    cache, other = cache_of(HEADS, 3), cache_of(HEADS, 2, ring=4)
    step(rule, part(rows, 0, 5), 0, weights, cache)
    step(rule, part(rows, 5, 40), 5, weights, cache, (StateSave(0, num_rows, 2),))
    position = 5 + num_rows
    assert other.write(1, position, cache.read(2, position)) == cache.read(2, position).numel()
    found = step(rule, part(rows, position, LENGTH), position, weights, other)
    assert found.equal(step(rule, rows, 0, weights, cache_of(HEADS, 2))[position:])


@pytest.mark.parametrize("accepted", [0, 2, 5])
def test_a_step_goes_on_behind_accepted_drafts(rule: Rule, accepted: int) -> None:
    rows, weights = rows_of(HEADS, LENGTH), weights_of(HEADS)
    cache, drafts = cache_of(HEADS, 3), rows_of(HEADS, 5 - accepted)
    step(rule, part(rows, 0, 20), 0, weights, cache)
    both = [torch.cat(each) for each in zip(part(rows, 20, 21 + accepted), drafts, strict=True)]
    # One settled row, then five drafts.
    states = StateSlots((1,), (0, 6), (20,), (20,), (21,))
    rule(*both, weights, HEADS, cache, states)
    start = 21 + accepted
    states = StateSlots((1,), (0, LENGTH - start), (start,), (21,), (LENGTH,))
    found = rule(*part(rows, start, LENGTH), weights, HEADS, cache, states)
    assert found.equal(step(rule, rows, 0, weights, cache_of(HEADS, 2))[start:])


@pytest.mark.parametrize(
    "heads", [HEADS, DeltaHeads(1, 1, 7, 5), DeltaHeads(4, 8, 64, 128), DeltaHeads(2, 4, 128, 64)]
)
@pytest.mark.parametrize("taps", [2, 4])
def test_c_gives_what_torch_gives(heads: DeltaHeads, taps: int) -> None:
    weights, rules = weights_of(heads, taps), (cpu_ops(library_folder()).delta_net,)
    caches = [cache_of(heads, 5, ring=taps + 4, taps=taps) for _ in range(2)]
    starts, stands = [0, 0], [0, 0]
    # Of each request: its rows, how many of them are drafts, and how many of these are accepted.
    for sizes, drafts, accepted in (
        ([20, 1], [0, 0], [0, 0]),
        ([1, 5], [0, 4], [0, 3]),
        ([4, 18], [3, 2], [0, 0]),
        ([3, 1], [0, 0], [0, 0]),
    ):
        rows = rows_of(heads, sum(sizes) + 1)
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        settled = [end - count for end, count in zip(ends, drafts, strict=True)]
        saves = (StateSave(0, 1, 3), StateSave(1, sizes[1] - drafts[1], 4))
        states = StateSlots(
            (2, 0), (0, sizes[0], sum(sizes)), tuple(starts), tuple(stands), tuple(settled), saves
        )
        found, expected = (
            each(*rows, weights, heads, cache, states)
            for each, cache in zip((*rules, delta_net_reference), caches, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        assert not found[-1].any()  # a padding row
        stands = settled
        starts = [each + count for each, count in zip(settled, accepted, strict=True)]
        for slot, position in ((2, settled[0]), (0, settled[1]), (4, settled[1])):
            held = [cache.read(slot, position).view(torch.float32) for cache in caches]
            torch.testing.assert_close(*held, atol=1e-4, rtol=1e-4)
