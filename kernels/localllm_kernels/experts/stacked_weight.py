"""The weights of one linear of all experts, as the GPU's product reads them; see product.py.

Codes of 4 bits lie in groups of 32 inputs: byte j of 16 has input j in its low bits and input
16 + j in its high ones, so that either half of a tile is a tile of neighbouring inputs.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from localllm_kernels.coded_blocks import BLOCK_TYPES
from localllm_kernels.compiling.traits import WeightLayout
from localllm_kernels.trellis import MIN_MIXED, Mixing, num_mixed

StackedKind = Literal["plain", "int8", "fp8", "int4", "mxfp4", "blocks", "nvfp4", "trellis3"]
STACKED_KINDS: tuple[StackedKind, ...] = get_args(StackedKind)
FOUR_BITS = ("int4", "mxfp4", "nvfp4")
# Inputs that the product multiplies at once; of 4-bit codes and of trellises, half of them.
STEP = 128
_HALF = 16
_TENSORS = ("codes", "scales", "zeros", "bias", "factors")


@dataclass(frozen=True, slots=True)
class StackedWeight:
    """`codes`: [experts, out, in], uint8 [experts, out, in / 2], or [experts, out, bytes]: GGUF's
    blocks, which are of `block_type`, as `coded_blocks.arranged` has them, or the 1 + 3 · in / 8 of
    a row on a trellis, a zero first; `scales`: [experts, out, groups] in any float type, in uint8
    exponents for mxfp4 and bytes of e4m3 for nvfp4, None for plain weights, blocks and trellises;
    `zeros`: uint8 like `scales`, None for 8 everywhere; `factors`: float32 [experts, out], of
    nvfp4's scales and of steps; `bias`: [experts, out]; `mixing`: of trellises alone.
    """

    kind: StackedKind
    codes: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bias: Tensor | None
    width_in: int
    block_type: str | None = None
    factors: Tensor | None = None
    mixing: Mixing | None = None

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

        joined = {name: torch.cat([part.by_name[name] for part in parts]) for name in first.by_name}
        return first._with(joined)

    @property
    def by_name(self) -> dict[str, Tensor]:
        """Those tensors that are there, [experts, ...] each, by their fields."""
        found = {name: getattr(self, name) for name in _TENSORS}
        return {name: each for name, each in found.items() if each is not None}

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Those that are there."""
        return tuple(self.by_name.values())

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "StackedWeight":
        """With each of its tensors changed."""
        return self._with({name: change(each) for name, each in self.by_name.items()})

    def _with(self, tensors: Mapping[str, Tensor]) -> "StackedWeight":
        """The same of other tensors, by their fields."""
        scales, zeros, bias, factors = map(tensors.get, ("scales", "zeros", "bias", "factors"))
        codes = tensors["codes"]
        return replace(self, codes=codes, scales=scales, zeros=zeros, bias=bias, factors=factors)

    @property
    def form(self) -> tuple[object, ...]:
        """Everything but the values and the number of experts."""
        forms = ((name, each.shape[1:], each.dtype) for name, each in self.by_name.items())
        return self.kind, self.block_type, *forms


def pack_halves(codes: Tensor) -> Tensor:
    """`codes`: uint8 [out, in] below 16, in a multiple of 32 -> uint8 [out, in / 2]."""
    groups = codes.view(len(codes), -1, 2, _HALF)
    return (groups[:, :, 0] | groups[:, :, 1] << 4).flatten(1)


def unpack_halves(packed: Tensor) -> Tensor:
    """The inverse, over the last dimension."""
    groups = packed.view(*packed.shape[:-1], -1, _HALF)
    return torch.stack((groups & 15, groups >> 4), dim=-2).flatten(-3)


def can_stack(layout: WeightLayout) -> bool:
    """Whether the product takes experts with such weights, if all are alike and in their order."""
    if layout.kind in BLOCK_TYPES:
        return True
    if layout.kind == "trellis3":
        return num_mixed(layout.width_in) >= MIN_MIXED
    group = min(layout.group, layout.width_in)
    is_even = layout.width_in % group == 0
    is_known = layout.kind in STACKED_KINDS
    return is_known and is_even and takes_group(layout.kind, group, layout.width_in)


def takes_group(kind: str, group: int, width_in: int) -> bool:
    """Whether the product supports such groups: a step is one of them, or lies within one."""
    if kind == "nvfp4":
        return group == _HALF and width_in % (2 * _HALF) == 0
    if kind in FOUR_BITS:
        return group in (32, 64) or group % STEP == 0
    return group >= width_in or group % STEP == 0
