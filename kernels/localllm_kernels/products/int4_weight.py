"""A 4-bit weight as the GPU's kernels read it, and what can be fused with its product.

It is laid out as the matrix units take it, so that no thread has to hand a code to another. A block
is 16 outputs by 64 inputs, 512 bytes that a warp reads at once; lane 4 g + t has the four words

    word 2 h + i  =  outputs g + 8 h, inputs 32 i + 4 t + {0 to 3} and 32 i + 16 + 4 t + {0 to 3}

Within a word the codes of two neighbouring inputs are 16 bits apart, so that one operation makes
both into halves of a register:

    input 32 i + 16 s + 4 t + q  at bit  8 s + 4 (q / 2) + 16 (q mod 2)

A step of the matrix units (`mma` m16n8k16 in the PTX ISA, "Matrix Fragments for mma.m16n8k16") has
sixteen inputs, in an order that does not matter as long as x has the same one: here a lane has four
neighbours, which are eight bytes of x. The idea of a layout that matches the fragments is from
Frantar et al. 2024, "MARLIN", section 3.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm_kernels.linears import CodedWeight

TILE = 16  # outputs of a block
BLOCK = 64  # inputs of a block


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A weight in the layout of the kernels; see the top of the file."""

    words: Tensor  # int32 [ceil(out / 16), ceil(in / 64), 32 lanes, 4]
    scales: Tensor  # float [out, num_groups]
    zeros: Tensor | None  # uint8 [out, num_groups]; None: 8 everywhere
    permutation: Tensor | None  # int64 [in]: the input that each column belongs to
    bias: Tensor | None  # [out]
    width_in: int

    @property
    def width_out(self) -> int:
        """Outputs."""
        return self.scales.shape[0]

    @property
    def num_blocks(self) -> int:
        """Blocks of the inputs, the last one padded with zeros."""
        return self.words.shape[1]

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.width_in // self.scales.shape[1]

    @classmethod
    def pack(cls, weight: CodedWeight, bias: Tensor | None) -> "PackedInt4":
        """From 4-bit codes. Raises: ValueError for groups that `takes_groups` rejects."""
        codes, scales, zeros = weight.codes, weight.scales, weight.zeros
        width_out, width_in = codes.shape
        if not takes_groups(width_in // scales.shape[1]):
            raise ValueError(f"group size {width_in // scales.shape[1]} is not supported")
        padded = F.pad(codes, (0, -width_in % BLOCK, 0, -width_out % TILE))
        tiles, blocks = padded.shape[0] // TILE, padded.shape[1] // BLOCK
        # Tile, h, g, block, i, s, t, q.
        parts = padded.view(tiles, 2, 8, blocks, 2, 2, 4, 4)
        words = torch.zeros((tiles, blocks, 8, 4, 2, 2), dtype=torch.int32, device=codes.device)
        for s in range(2):
            for q in range(4):
                place = 8 * s + 4 * (q // 2) + 16 * (q % 2)
                of_lanes = parts[..., s, :, q].permute(0, 3, 2, 5, 1, 4)  # tile, block, g, t, h, i
                words |= of_lanes.to(torch.int32) << place
        return cls(
            words.view(tiles, blocks, 32, 4),
            scales.contiguous(),
            None if zeros is None else zeros.contiguous(),
            weight.permutation,
            bias,
            width_in,
        )


def takes_groups(group_size: int) -> bool:
    """Whether the kernels support groups of this size, which steps of 16 inputs cannot straddle."""
    return group_size in (16, 32, 64) or group_size % 128 == 0


@dataclass(frozen=True, slots=True)
class Around:
    """What is fused with a product: the norm before it, and the gate and the residual after it."""

    norm: Tensor | None = None  # its weight, [in]
    eps: float = 0.0
    is_gated: bool = False  # silu(first half of the outputs) · second half
    residual: Tensor | None = None  # [rows, outputs]


NOTHING = Around()
