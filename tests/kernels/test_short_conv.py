"""The short convolution gives what torch's gives, whatever the steps."""

import pytest
import torch

from localllm_kernels.short_conv import short_conv_reference
from localllm_kernels.state_cache import StateCache, StateSave, StateSlots

WIDTH, RING = 6, 5


def whole(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Torch's convolution over a whole sequence, [num_tokens, width]."""
    taps = weight.shape[1]
    padded = torch.nn.functional.pad(x.T[None], (taps - 1, 0))
    return torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=WIDTH)[0].T


def step(
    x: torch.Tensor, start: int, weight: torch.Tensor, cache: StateCache, saves: list[StateSave]
) -> torch.Tensor:
    states = StateSlots((1,), (0, len(x)), (start,), tuple(saves))
    return short_conv_reference(x, weight, None, cache, states)


@pytest.mark.parametrize("taps", [2, 3, 4])
@pytest.mark.parametrize("sizes", [[20], [1] * 20, [3, 1, 9, 2, 5], [7, 13]])
def test_steps_give_the_convolution_of_the_whole(taps: int, sizes: list[int]) -> None:
    x, weight = torch.randn(20, WIDTH), torch.randn(WIDTH, taps)
    # What a slot held before is not read.
    cache = StateCache(torch.full((3, RING, WIDTH), torch.nan), taps - 1)
    found, start = [], 0
    for size in sizes:
        found.append(step(x[start : start + size], start, weight, cache, []))
        start += size
    torch.testing.assert_close(torch.cat(found), whole(x, weight, None), atol=1e-6, rtol=1e-6)
    assert cache.rows[[0, 2]].isnan().all()


def test_requests_side_by_side_and_a_bias() -> None:
    x, weight, bias = torch.randn(12, WIDTH), torch.randn(WIDTH, 3), torch.randn(WIDTH)
    cache = StateCache(torch.zeros(2, RING, WIDTH), 2)
    states = StateSlots((1, 0), (0, 4, 11), (0, 0))
    found = short_conv_reference(x, weight, bias, cache, states)
    for rows in (slice(0, 4), slice(4, 11)):
        expected = whole(x[rows], weight, bias)
        torch.testing.assert_close(found[rows], expected, atol=1e-6, rtol=1e-6)
    assert not found[11:].any()  # a padding row


@pytest.mark.parametrize("num_rows", [1, 2, 6, 9])
def test_a_copy_within_a_step_is_the_state_there(num_rows: int) -> None:
    x, weight = torch.randn(20, WIDTH), torch.randn(WIDTH, 4)
    cache = StateCache(torch.zeros(3, RING + 3, WIDTH), 3)
    step(x[:5], 0, weight, cache, [])
    step(x[5:14], 5, weight, cache, [StateSave(0, num_rows, 2)])
    position = 5 + num_rows
    other = StateCache(torch.zeros(3, RING, WIDTH), 3)
    # Rings of other sizes hold the same, once it is read.
    assert other.write(1, position, cache.read(2, position)) == 3 * WIDTH * 4
    found = step(x[position:], position, weight, other, [])
    assert found.equal(step(x, 0, weight, StateCache(other.rows * 0, 3), [])[position:])


def test_a_rejected_draft_is_overwritten() -> None:
    x, weight = torch.randn(20, WIDTH), torch.randn(WIDTH, 4)
    cache = StateCache(torch.zeros(3, 3 + 4, WIDTH), 3)
    step(x[:9], 0, weight, cache, [])
    draft = torch.cat([x[9:11], torch.randn(3, WIDTH)])  # one of four accepted
    step(draft, 9, weight, cache, [])
    found = step(x[11:], 11, weight, cache, [])
    assert found.equal(step(x, 0, weight, StateCache(cache.rows * 0, 3), [])[11:])
