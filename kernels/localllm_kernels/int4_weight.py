"""A 4-bit weight as the GPU's kernels read it, and what may be computed around its product.

A word holds eight codes of one output, sixteen inputs apart, so that the sixteen words of
a span of 128 inputs give eight planes of sixteen inputs, each by a shift that is a constant:

    word[n, 16 t + r], bits 4 j to 4 j + 3  =  code of input 128 t + 16 j + r

Each plane belongs to neighbouring inputs, which is what a product of tiles takes, and needs no
instruction that only some processors have.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

SPAN = 128  # inputs
PLANES = 8
WORDS = SPAN // PLANES  # of an output in a span


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """A weight in the layout of the kernels; see the top of the file."""

    words: Tensor  # int32 [out, 16 · ceil(in / 128)]
    scales: Tensor  # float [out, num_groups]
    zeros: Tensor | None  # uint8 [out, num_groups]; None: 8 everywhere
    permutation: Tensor | None  # int64 [in]: the input that each column belongs to
    bias: Tensor | None  # [out]
    width_in: int

    @property
    def width_out(self) -> int:
        """Outputs."""
        return self.words.shape[0]

    @property
    def num_spans(self) -> int:
        """Spans of the inputs, the last one filled up with zeros."""
        return self.words.shape[1] // WORDS

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.width_in // self.scales.shape[1]

    @classmethod
    def pack(
        cls,
        codes: Tensor,
        scales: Tensor,
        zeros: Tensor | None,
        permutation: Tensor | None,
        bias: Tensor | None,
    ) -> "PackedInt4":
        """`codes`: uint8 [out, in] below 16; `scales`, `zeros`: [out, num_groups].

        Raises: ValueError for groups that `takes_groups` does not know.
        """
        width_out, width_in = codes.shape
        if not takes_groups(width_in // scales.shape[1]):
            raise ValueError(f"groups of {width_in // scales.shape[1]} are not meant")
        padded = F.pad(codes, (0, -width_in % SPAN)).view(width_out, -1, PLANES, WORDS)
        words = torch.zeros(
            (width_out, padded.shape[1], WORDS), dtype=torch.int32, device=codes.device
        )
        for plane in range(PLANES):
            words |= padded[:, :, plane].to(torch.int32) << (4 * plane)
        return cls(
            words.flatten(1),
            scales.contiguous(),
            None if zeros is None else zeros.contiguous(),
            permutation,
            bias,
            width_in,
        )


def takes_groups(group_size: int) -> bool:
    """Whether the kernels know groups of this size: planes do not straddle them."""
    return group_size in (16, 32, 64) or group_size % SPAN == 0


@dataclass(frozen=True, slots=True)
class Around:
    """What is computed with a product: the norm before it, and the gate and the sum behind it."""

    norm: Tensor | None = None  # its weight, [in]
    eps: float = 0.0
    is_gated: bool = False  # silu(first half of the outputs) · second half
    residual: Tensor | None = None  # [rows, outputs]


NOTHING = Around()
