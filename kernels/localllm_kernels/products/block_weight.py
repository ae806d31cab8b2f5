"""A weight in GGUF's blocks as the GPU's kernels take it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm_kernels.coded_blocks import joined
from localllm_kernels.linears import BlockRows, BlocksWeight

# Values and bytes of a block, by type.
BLOCK_SIZES = {
    **{"Q4_K": (256, 144), "Q6_K": (256, 210), "Q5_K": (256, 176), "Q3_K": (256, 110)},
    **{"Q2_K": (256, 84), "IQ4_XS": (256, 136), "Q8_0": (32, 34), "Q4_0": (32, 18)},
    **{"Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "IQ4_NL": (32, 18), "MXFP4": (32, 17)},
}
# Types with products.
BLOCK_TYPES = frozenset(BLOCK_SIZES)


@dataclass(frozen=True, slots=True)
class PackedBlocks:
    """`parts`: rows as `arranged` has them, one below the other; `places`: int32 [out], the output
    that each row is, None if they are in order; `bias`: [out], in the order of the outputs.
    """

    parts: tuple[BlockRows, ...]
    width_in: int
    places: Tensor | None
    bias: Tensor | None

    @property
    def width_out(self) -> int:
        """Outputs."""
        return sum(len(part.codes) for part in self.parts)

    @classmethod
    def pack(cls, weight: BlocksWeight, bias: Tensor | None) -> "PackedBlocks":
        """Neighbouring parts of one type are one. The rows of a weight of one type are brought into
        order; parts of several types write their outputs to their places.
        """
        parts, places = tuple(joined(weight.parts)), None
        if weight.order is not None:
            if len(parts) == 1:
                parts = (BlockRows(parts[0].type, parts[0].codes[weight.order]),)
            else:
                places = torch.empty_like(weight.order, dtype=torch.int32)
                numbers = torch.arange(len(places), dtype=torch.int32, device=places.device)
                places[weight.order] = numbers
        return cls(tuple(map(arranged, parts)), weight.width_in, places, bias)


def arranged(rows: BlockRows) -> BlockRows:
    """Rows that follow each other, from an address on where any type can be read.

    The blocks of Q6_K would begin at odd halves of words: of them each row has the lower bits of
    all codes, then the upper ones, the steps and the scales, and begins at a multiple of 16 bytes.
    """
    codes = rows.codes
    if rows.type == "Q6_K":
        blocks = codes.view(len(codes), -1, 210)
        fields = [each.flatten(1) for each in torch.split(blocks, [128, 64, 16, 2], dim=2)]
        filled = codes.new_zeros(len(codes), -codes.shape[1] % 16)
        return BlockRows(rows.type, torch.cat((*fields, filled), dim=1))
    codes = codes.contiguous()
    return BlockRows(rows.type, codes if codes.data_ptr() % 16 == 0 else codes.clone())
