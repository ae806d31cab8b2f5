"""A weight in GGUF's blocks as the GPU's kernels take it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm_kernels.coded_blocks import arranged, joined
from localllm_kernels.linears import BlockRows, BlocksWeight


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
