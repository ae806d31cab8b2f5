"""Weights of 3 bits on a trellis: what their bits stand for, and the rotation of their inputs.

Trellis-coded quantization (Marcellin and Fischer 1990; for weights Tseng et al. 2024, "QTIP"): a
weight is the entry of a table at the 7 newest bits of its row, 3 of which are its own. The 4 older
ones make it depend on its neighbour, so that the values of a row can be 128 ones, at 3 bits each.
Inputs and weights are rotated by a Hadamard matrix with signs drawn by a hash (Chee et al. 2023,
"QuIP"), which makes the weights of a row normally distributed: one table and a scale for each row
suffice.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

BITS = 3
# Of the state before a weight: the newest bits of those before it.
STATE_BITS = 4
# Bytes of a row hold so many weights.
IN_BYTES, BYTES = 8, 3
# Steps for each window, the newest bits highest; found by tools/trellis_table.py.
TABLE = (
    *(-4, -63, -10, -24, 7, -35, 14, 27, 20, -14, -26, 9, 1, -7, 31, -41),
    *(-49, -1, 40, 16, -18, 8, -9, -28, -3, -9, -17, -52, 16, -26, 37, 4),
    *(6, -34, 26, -2, -10, -19, 37, 17, -12, 1, 14, 11, 32, -5, 5, 23),
    *(-17, 63, 13, 24, 33, 45, -38, -11, -32, 20, 33, -23, 6, -14, -4, 13),
    *(42, -9, 7, -17, -27, 14, -1, 0, 13, -21, 4, -13, -30, 26, 49, -5),
    *(-25, 32, -1, -12, -36, -7, 21, 7, -46, 39, 23, 2, -6, 14, -13, -20),
    *(27, -14, -31, 5, -3, 21, -21, 12, -21, 30, -9, 18, -41, 1, 23, 9),
    *(13, -24, -17, -39, 21, 1, 6, -7, 5, 52, -1, -7, -17, 8, 16, -29),
)
# Inputs that a rotation mixes: 128 lose 4 % more of `pocket`, and more cost a GPU's product more.
_MOST_MIXED = 256
# Those that a GPU's product mixes at least: the inputs of the smallest one of matrix units.
MIN_MIXED = 16
# A step, for weights whose standard deviation is 1.
STEP = 0.0488


def pack_windows(windows: Tensor) -> Tensor:
    """uint8 [..., n], each the 7 newest bits -> uint8 [..., 3n / 8], of each its own 3 bits: the
    first in the lowest ones.
    """
    own = (windows >> STATE_BITS).int().view(*windows.shape[:-1], -1, IN_BYTES)
    places = BITS * torch.arange(IN_BYTES, device=windows.device)
    whole = (own << places).sum(-1, dtype=torch.int32)
    return torch.stack([(whole >> 8 * i) & 255 for i in range(BYTES)], -1).byte().flatten(-2)


def unpack_windows(packed: Tensor) -> Tensor:
    """The inverse of `pack_windows`; bits before the first weight are 0."""
    three = packed.view(*packed.shape[:-1], -1, BYTES).int()
    before = F.pad(three[..., :-1, -1], (1, 0))
    word = before | three[..., 0] << 8 | three[..., 1] << 16 | three[..., 2] << 24
    places = 8 - STATE_BITS + BITS * torch.arange(IN_BYTES, device=packed.device)
    windows: Tensor = word[..., None] >> places & (1 << STATE_BITS + BITS) - 1
    return windows.byte().flatten(-2)


def num_mixed(width: int) -> int:
    """Inputs that are mixed with each other."""
    return min(width & -width, _MOST_MIXED)


def signs(width: int) -> Tensor:
    """What inputs are multiplied with before they are mixed, float32 [width]: signs, by a hash of
    their places, times the factor that keeps lengths.
    """
    place = torch.arange(width, dtype=torch.int64)
    for factor in (0x85EBCA6B, 0xC2B2AE35):
        place = (place + 1) * factor & 0xFFFFFFFF
        place = place ^ place >> 15
    drawn = torch.where(place & 1 == 1, -1.0, 1.0)
    of_length: float = num_mixed(width) ** -0.5
    return drawn * of_length


@dataclass(frozen=True, slots=True)
class Mixing:
    """What all weights of a width share on a GPU. `signs`: float32 [in], see `signs`; `steps`:
    [128], the table in the dtype of inputs.
    """

    signs: Tensor
    steps: Tensor

    @classmethod
    def of(cls, width_in: int, dtype: torch.dtype, device: torch.device) -> "Mixing":
        """For inputs of a width, in `dtype`."""
        steps = torch.tensor(TABLE, dtype=dtype, device=device)
        return cls(signs(width_in).to(device), steps)

    def to(self, device: torch.device) -> "Mixing":
        """The same on another device."""
        return Mixing(self.signs.to(device), self.steps.to(device))


def rotated(x: Tensor, by: Tensor) -> Tensor:
    """Rows of inputs or of a weight, float32 [..., width], multiplied with `by` (`signs`), then
    `num_mixed` of them with each other, which lie evenly apart.
    """
    return _mixed(x * by)


def turned_back(x: Tensor, by: Tensor) -> Tensor:
    """The inverse of `rotated`."""
    return _mixed(x) * by


def _mixed(x: Tensor) -> Tensor:
    """Times the Hadamard matrix, up to its factor."""
    run = width = x.shape[-1]
    while run * num_mixed(width) > width:
        run //= 2
        first, second = x.view(*x.shape[:-1], width // (2 * run), 2, run).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
    return x
