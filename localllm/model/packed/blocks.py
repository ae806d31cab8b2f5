"""Weights in the blocks of GGUF files, which stay as they lie in the file."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from torch import Tensor

from localllm.files.gguf import EIGHT_BITS, BlockType
from localllm.model.packed.gguf_blocks import dequantize_blocks
from localllm.model.packed.weight import PackedWeight
from localllm_kernels.compiling.traits import WeightLayout
from localllm_kernels.linears import BlockRows, BlocksWeight


@dataclass(frozen=True, slots=True)
class BlockPart:
    """Rows of one type: `codes` uint8 [rows, bytes], a view of the file's map."""

    type: BlockType
    codes: Tensor


# Rows that are dequantized at a time, to be kept in eight bits.
_ROWS = 1024


def to_eight_bits(block: BlockType, codes: Tensor) -> Tensor:
    """The blocks of Q8_0 that are nearest to those of another type, uint8 [rows, bytes]."""
    return torch.cat(
        [_rounded(dequantize_blocks(block, part)) for part in torch.split(codes, _ROWS)]
    )


def _rounded(values: Tensor) -> Tensor:
    groups = values.view(-1, EIGHT_BITS.num_values)
    scales = (groups.abs().amax(1, keepdim=True) / 127).half()
    steps = scales.float()
    whole = (groups / torch.where(steps > 0, steps, 1)).round().clamp(-127, 127).to(torch.int8)
    blocks = torch.cat((scales.view(torch.uint8), whole.view(torch.uint8)), dim=1)
    return blocks.view(len(values), -1)


@dataclass(frozen=True, slots=True)
class BlockWeight(PackedWeight):
    """The rows of one or several tensors, each in its own type, one below the other.

    `codes`: those of the first part; `order`: int64 [out], which of these rows each output is; None
    if they are in order.
    """

    kind: ClassVar[Literal["blocks"]] = "blocks"

    codes: Tensor
    parts: tuple[BlockPart, ...]
    order: Tensor | None = None

    @classmethod
    def of(cls, block: BlockType, codes: Tensor) -> "BlockWeight":
        """A weight of one tensor; `codes`: uint8 [out, bytes]."""
        return cls(codes, (BlockPart(block, codes),))

    @property
    def shape(self) -> tuple[int, int]:
        first = self.parts[0]
        width_in = first.codes.shape[1] // first.type.num_bytes * first.type.num_values
        return sum(len(part.codes) for part in self.parts), width_in

    @property
    def layout(self) -> WeightLayout:
        return WeightLayout(self.parts[0].type.name, self.shape[1], 32)

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """[out, in] in `dtype`, float32 if None, which is exact."""
        values = torch.cat([dequantize_blocks(part.type, part.codes) for part in self.parts])
        ordered = values if self.order is None else values[self.order]
        return ordered.to(dtype or torch.float32)

    def rows(self, ids: Tensor) -> Tensor:
        """Some of the rows, float32 [..., in]; `ids`: int64 [...]. Of a weight of one part."""
        [part] = self.parts
        values = dequantize_blocks(part.type, part.codes[ids.flatten()])
        return values.view(*ids.shape, -1)

    def fuses_with(self, other: object) -> bool:
        return isinstance(other, BlockWeight) and self.shape[1] == other.shape[1]

    @classmethod
    def stack(cls, parts: Sequence[Self]) -> Self:
        assert all(part.order is None for part in parts)
        return cls(parts[0].codes, tuple(each for part in parts for each in part.parts))

    def take_rows(self, order: Tensor) -> "BlockWeight":
        now = order if self.order is None else self.order[order]
        return BlockWeight(self.codes, self.parts, now)

    def coded(self) -> BlocksWeight:
        rows = tuple(BlockRows(part.type.name, part.codes) for part in self.parts)
        return BlocksWeight(rows, self.shape[1], self.order)
