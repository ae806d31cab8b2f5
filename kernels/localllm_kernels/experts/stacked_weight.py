"""The weights of one linear of all experts, as the GPU's product reads them; see product.py.

Codes of 4 bits lie in groups of 32 inputs: byte j of 16 has input j in its low bits and input
16 + j in its high ones, so that either half of a tile is a tile of neighbouring inputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

StackedKind = Literal["plain", "int8", "fp8", "int4", "mxfp4", "blocks"]
STACKED_KINDS: tuple[StackedKind, ...] = get_args(StackedKind)
FOUR_BITS = ("int4", "mxfp4")
# Inputs that the product multiplies at once; of 4-bit codes, half of them.
STEP = 128
_HALF = 16


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """`codes`: [experts, out, in], uint8 [experts, out, in / 2], or [experts, out, bytes] as
    `coded_blocks.arranged` has GGUF's blocks, which are of `block_type`; `scales`: [experts, out,
    groups] in any float type, exponents in uint8 for mxfp4, None for plain weights and blocks;
    `zeros`: uint8 like `scales`, None for 8 everywhere; `bias`: [experts, out].
    """

    kind: StackedKind
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    width_in: int
    block_type: str | None = None

    @property
    def num_experts(self) -> int:
        """Experts."""
        return self.codes.shape[0]

    @property
    def width_out(self) -> int:
        """Outputs of each."""
        return self.codes.shape[1]

    @property
    def group(self) -> int:
        """Inputs that share a scale."""
        return self.width_in if self.scales is None else self.width_in // self.scales.shape[2]

    @classmethod
    def stack(cls, parts: Sequence["StackedWeight"]) -> "StackedWeight | None":
        """All experts of `parts`, None if they differ in more than their values."""
        first = parts[0]
        if any(part.form != first.form for part in parts):
            return None

        def joined(name: str) -> Tensor | None:
            if getattr(first, name) is None:
                return None
            return torch.cat([getattr(part, name) for part in parts])

        codes = joined("codes")
        assert codes is not None
        scales, zeros, bias = map(joined, ("scales", "zeros", "bias"))
        return replace(first, codes=codes, scales=scales, zeros=zeros, bias=bias)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are there, [experts, ...] each."""
        found = (self.codes, self.scales, self.zeros, self.bias)
        return tuple(each for each in found if each is not None)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "StackedWeight":
        """With each of its tensors changed."""
        scales, zeros, bias = (
            None if each is None else change(each) for each in (self.scales, self.zeros, self.bias)
        )
        return replace(self, codes=change(self.codes), scales=scales, zeros=zeros, bias=bias)

    @property
    def form(self) -> tuple[object, ...]:
        """Everything but the values and the number of experts."""
        tensors = (self.codes, self.scales, self.zeros, self.bias)
        forms = (None if each is None else (each.shape[1:], each.dtype) for each in tensors)
        return self.kind, self.block_type, *forms


def pack_halves(codes: Tensor) -> Tensor:
    """`codes`: uint8 [out, in] below 16, in a multiple of 32 -> uint8 [out, in / 2]."""
    groups = codes.view(len(codes), -1, 2, _HALF)
    return (groups[:, :, 0] | groups[:, :, 1] << 4).flatten(1)


def unpack_halves(packed: Tensor) -> Tensor:
    """The inverse, over the last dimension."""
    groups = packed.view(*packed.shape[:-1], -1, _HALF)
    return torch.stack((groups & 15, groups >> 4), dim=-2).flatten(-3)


def takes_group(kind: str, group: int, width_in: int) -> bool:
    """Whether the product supports such groups: a step is one of them, or lies within one."""
    if kind in FOUR_BITS:
        return group in (32, 64) or group % STEP == 0
    return group >= width_in or group % STEP == 0
