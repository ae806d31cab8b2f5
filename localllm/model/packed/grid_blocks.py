"""The values of GGUF's blocks of less than four bits, exactly: those with grids, and ternary ones.

In IQ types a code stands for four or eight values at once, those of a row of a grid, and bits
beside it for their signs. Source of the layouts: `src/ggml-common.h` and `src/ggml-quants.c` of
ggml; of the grids, tools/gguf_grids.py.
"""

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_GRIDS = Path(__file__).with_name("grids.npz")
# What IQ1's values are shifted by, one way or the other.
_SHIFT = 0.125


@cache
def _grid(name: str) -> Tensor:
    """The rows of a grid, float32 [codes, 4 or 8]."""
    with np.load(_GRIDS) as grids:
        return torch.from_numpy(grids[name]).float()


def _look_up(name: str, codes: Tensor) -> Tensor:
    """The rows that codes [..., n] stand for: [..., n · values of a row]."""
    return _grid(name).to(codes.device)[codes.long()].flatten(-2)


def _half(blocks: Tensor, start: int) -> Tensor:
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _words(blocks: Tensor, start: int, end: int, width: int) -> Tensor:
    """Little-endian words of `width` bytes, int64 [blocks, words]."""
    parts = blocks[:, start:end].reshape(len(blocks), -1, width).long()
    return (parts << 8 * torch.arange(width, device=blocks.device)).sum(-1)


def _apart(words: Tensor, shifts: tuple[int, ...], mask: int) -> Tensor:
    """Parts of words [..., n] from each shift on, side by side: [..., n · shifts]."""
    steps = torch.tensor(shifts, device=words.device)
    return (words[..., None] >> steps & mask).flatten(-2)


def _signs(masks: Tensor) -> Tensor:
    """1 or -1 for each bit of bytes [..., n], lowest first: float32 [..., 8 · n]."""
    return 1.0 - 2.0 * _apart(masks, tuple(range(8)), 1).float()


def _even_signs(masks: Tensor) -> Tensor:
    """The same of seven bits and one more, with which the number of signs is even."""
    parity = _apart(masks, tuple(range(7)), 1).view(*masks.shape, 7).sum(-1) & 1
    return _signs(masks | parity << 7)


def _scaled(values: Tensor, scales: Tensor) -> Tensor:
    """Values [blocks, 256] times the scales of equal shares of them, [blocks, shares]."""
    shares = values.view(*scales.shape, -1)
    return (scales[:, :, None] * shares).flatten(1)


def _iq2_xxs(blocks: Tensor) -> Tensor:
    pairs = _words(blocks, 2, 66, 4).view(len(blocks), 8, 2)
    codes, beside = _apart(pairs[..., 0], (0, 8, 16, 24), 255), pairs[..., 1]
    signs = _even_signs(_apart(beside, (0, 7, 14, 21), 127))
    scales = _half(blocks, 0) * (0.5 + (beside >> 28).float()) * 0.25
    return _scaled(_look_up("IQ2_XXS", codes) * signs, scales)


def _iq2_xs(blocks: Tensor) -> Tensor:
    words = _words(blocks, 2, 66, 2)
    values = _look_up("IQ2_XS", words & 511) * _even_signs(words >> 9)
    return _scaled(values, _quarter_scales(blocks, 66))


def _iq2_s(blocks: Tensor) -> Tensor:
    high = _apart(blocks[:, 66:74].long(), (0, 2, 4, 6), 3)
    values = _look_up("IQ2_S", blocks[:, 2:34].long() | high << 8)
    return _scaled(values * _signs(blocks[:, 34:66].long()), _quarter_scales(blocks, 74))


def _quarter_scales(blocks: Tensor, start: int) -> Tensor:
    """Sixteen scales of four bits."""
    steps = _apart(blocks[:, start : start + 8].long(), (0, 4), 15)
    return _half(blocks, 0) * (0.5 + steps.float()) * 0.25


def _iq3_xxs(blocks: Tensor) -> Tensor:
    beside = _words(blocks, 66, 98, 4)
    signs = _even_signs(_apart(beside, (0, 7, 14, 21), 127))
    scales = _half(blocks, 0) * (0.5 + (beside >> 28).float()) * 0.5
    return _scaled(_look_up("IQ3_XXS", blocks[:, 2:66]) * signs, scales)


def _iq3_s(blocks: Tensor) -> Tensor:
    high = _apart(blocks[:, 66:74].long(), tuple(range(8)), 1)
    values = _look_up("IQ3_S", blocks[:, 2:66].long() | high << 8)
    steps = _apart(blocks[:, 106:110].long(), (0, 4), 15)
    scales = _half(blocks, 0) * (1 + 2 * steps).float()
    return _scaled(values * _signs(blocks[:, 74:106].long()), scales)


def _iq1_s(blocks: Tensor) -> Tensor:
    beside = _words(blocks, 34, 50, 2)
    codes = blocks[:, 2:34].long() | _apart(beside, (0, 3, 6, 9), 7) << 8
    shifts = _SHIFT * (1.0 - 2.0 * (beside >> 15).float())
    values = _look_up("IQ1_S", codes).view(*beside.shape, -1) + shifts[:, :, None]
    return _scaled(values.flatten(1), _half(blocks, 0) * (2 * (beside >> 12 & 7) + 1).float())


def _iq1_m(blocks: Tensor) -> Tensor:
    steps = _words(blocks, 48, 56, 2)
    # The upper four bits of four words are the half that scales the block.
    whole = (steps >> 12 << 4 * torch.arange(4, device=blocks.device)).sum(-1, keepdim=True)
    scale = whole.to(torch.int32).to(torch.int16).view(torch.float16).float()
    scales = scale * (2 * _apart(steps, (0, 3, 6, 9), 7) + 1).float()
    beside = _apart(blocks[:, 32:48].long(), (0, 4), 15)
    values = _look_up("IQ1_S", blocks[:, :32].long() | (beside & 7) << 8)
    shifts = _SHIFT * (1.0 - 2.0 * (beside >> 3).float())
    shifted = values.view(*beside.shape, -1) + shifts[:, :, None]
    return _scaled(shifted.flatten(1), scales)


def _tq1_0(blocks: Tensor) -> Tensor:
    """Five digits to the base of three in a byte, as a fraction of 256."""
    parts = []
    for start, end, digits in ((0, 32, 5), (32, 48, 5), (48, 52, 4)):
        powers = torch.tensor([3**i for i in range(digits)], device=blocks.device)
        fractions = blocks[:, None, start:end].long() * powers[:, None] & 255
        parts.append((fractions * 3 >> 8).flatten(1))
    return _half(blocks, 52) * (torch.cat(parts, dim=1) - 1).float()


def _tq2_0(blocks: Tensor) -> Tensor:
    runs = blocks[:, :64].long().view(-1, 2, 1, 32) >> torch.tensor(
        [[0], [2], [4], [6]], device=blocks.device
    )
    return _half(blocks, 64) * ((runs & 3).flatten(1) - 1).float()


# By the name of a type: the values, float32 [blocks, 256], of blocks, uint8 [blocks, bytes].
GRID_VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
    "TQ1_0": _tq1_0,
    "TQ2_0": _tq2_0,
}
