"""The short convolution gives what torch's gives, whatever the steps; those in C and for a GPU give
what ours gives.
"""

from collections.abc import Callable

import pytest
import torch
import triton

from localllm.engine.chosen_operators import library_folder
from localllm_kernels import cpu_ops
from localllm_kernels.recurrence.short_conv import short_conv_reference
from localllm_kernels.recurrence.short_conv_launch import short_conv
from localllm_kernels.recurrence.state_cache import StateCache, StateSave, StateSlots

WIDTH, RING = 300, 5
Conv = Callable[..., torch.Tensor]


@pytest.fixture(params=["torch", "C", "triton"])
def conv(request: pytest.FixtureRequest) -> Conv:
    if request.param == "torch":
        return short_conv_reference
    if request.param == "triton":
        if not triton.knobs.runtime.interpret:
            pytest.skip("Triton's interpreter is off")
        return short_conv
    return cpu_ops(library_folder()).short_conv


def whole(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Torch's convolution over a whole sequence, [num_tokens, width]."""
    before, after, values = rows.chunk(3, dim=-1)
    padded = torch.nn.functional.pad((before * values).T[None], (len(weight) - 1, 0))
    return after * torch.nn.functional.conv1d(padded, weight.T[:, None], bias, groups=WIDTH)[0].T


def step(
    conv: Conv,
    rows: torch.Tensor,
    start: int,
    weight: torch.Tensor,
    cache: StateCache,
    saves: list[StateSave],
) -> torch.Tensor:
    states = StateSlots(
        (1,), (0, len(rows)), (start,), (start,), (start + len(rows),), tuple(saves)
    )
    return conv(rows, weight, None, cache, states)


def rows_of(count: int) -> torch.Tensor:
    return torch.randn(count, 3 * WIDTH)


def read(cache: StateCache, slot: int, position: int) -> torch.Tensor:
    """What the slot holds, uint8."""
    found = torch.empty(cache.num_bytes(position), dtype=torch.uint8)
    assert cache.read(slot, position, found) == len(found)
    return found


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("sizes", [[20], [1] * 20, [3, 1, 9, 2, 5], [7, 13]])
def test_steps_give_the_convolution_of_the_whole(conv: Conv, taps: int, sizes: list[int]) -> None:
    rows, weight = rows_of(20), torch.randn(taps, WIDTH)
    # What a slot held before is not read.
    cache = StateCache(torch.full((3, RING, WIDTH), torch.nan), taps - 1)
    found, start = [], 0
    for size in sizes:
        found.append(step(conv, rows[start : start + size], start, weight, cache, []))
        start += size
    torch.testing.assert_close(torch.cat(found), whole(rows, weight, None), atol=1e-5, rtol=1e-5)
    once = StateCache(torch.zeros(3, taps - 1, WIDTH), taps - 1)
    assert torch.cat(found).equal(step(conv, rows, 0, weight, once, []))
    assert cache.rows[[0, 2]].isnan().all()


def test_requests_side_by_side_and_a_bias(conv: Conv) -> None:
    rows, weight, bias = rows_of(12), torch.randn(3, WIDTH), torch.randn(WIDTH)
    cache = StateCache(torch.zeros(2, RING, WIDTH), 2)
    states = StateSlots((1, 0), (0, 4, 11), (0, 0), (0, 0), (4, 7))
    found = conv(rows, weight, bias, cache, states)
    for each in (slice(0, 4), slice(4, 11)):
        expected = whole(rows[each], weight, bias)
        torch.testing.assert_close(found[each], expected, atol=1e-5, rtol=1e-5)
    assert not found[11:].any()  # a padding row


@pytest.mark.parametrize("num_rows", [1, 2, 6, 9])
def test_a_copy_within_a_step_is_the_state_there(conv: Conv, num_rows: int) -> None:
    rows, weight = rows_of(20), torch.randn(4, WIDTH)
    cache = StateCache(torch.zeros(3, RING + 3, WIDTH), 3)
    step(conv, rows[:5], 0, weight, cache, [])
    step(conv, rows[5:14], 5, weight, cache, [StateSave(0, num_rows, 2)])
    position = 5 + num_rows
    other = StateCache(torch.zeros(3, RING, WIDTH), 3)
    # Rings of other sizes hold the same, once it is read.
    assert other.write(1, position, read(cache, 2, position)) == 3 * WIDTH * 4
    found = step(conv, rows[position:], position, weight, other, [])
    alone = StateCache(torch.zeros(3, RING, WIDTH), 3)
    assert found.equal(step(conv, rows, 0, weight, alone, [])[position:])


def test_a_rejected_draft_is_overwritten(conv: Conv) -> None:
    rows, weight = rows_of(20), torch.randn(4, WIDTH)
    cache = StateCache(torch.zeros(3, 3 + 4, WIDTH), 3)
    step(conv, rows[:9], 0, weight, cache, [])
    draft = torch.cat([rows[9:11], rows_of(3)])  # one of four accepted
    step(conv, draft, 9, weight, cache, [])
    found = step(conv, rows[11:], 11, weight, cache, [])
    alone = StateCache(torch.zeros(3, RING, WIDTH), 3)
    assert found.equal(step(conv, rows, 0, weight, alone, [])[11:])


@pytest.mark.parametrize("taps", [3, 7])
def test_it_gives_what_torch_gives(conv: Conv, taps: int) -> None:
    weight, bias = torch.randn(taps, WIDTH), torch.randn(WIDTH)
    caches = [StateCache(torch.zeros(5, taps + 3, WIDTH), taps - 1) for _ in range(2)]
    starts = [0, 0]
    for sizes in ([9, 1], [1, 4], [3, 20], [1, 1]):
        rows = rows_of(sum(sizes))
        saves = (StateSave(0, 1, 3), StateSave(1, sizes[1], 4))
        states = StateSlots((2, 0), (0, sizes[0], sum(sizes)), *3 * [tuple(starts)], saves)
        found, expected = (
            each(rows, weight, bias, cache, states)
            for each, cache in zip((conv, short_conv_reference), caches, strict=True)
        )
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
        starts = [start + size for start, size in zip(starts, sizes, strict=True)]
        for slot, position in ((2, starts[0]), (0, starts[1]), (4, starts[1])):
            assert read(caches[0], slot, position).equal(read(caches[1], slot, position))
