"""The types of GGUF's blocks as formats of a linear: one tensor, whose dtype names its type."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from localllm.files.gguf import BLOCK_TYPES, EIGHT_BITS, BlockType
from localllm.model.packed.blocks import BlockWeight, to_eight_bits
from localllm.model.packed.scheme import Scheme, StoredTensor, check_multiple
from localllm_kernels.compiling.traits import WeightLayout

if TYPE_CHECKING:
    from torch import Tensor


# Types without a product of their own: those of less than four bits, but for K types.
KEPT_IN_EIGHT_BITS = frozenset(
    (
        *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S"),
        *("TQ1_0", "TQ2_0", "Q1_0", "Q2_0"),
    )
)


@dataclass(frozen=True, slots=True)
class Blocks(Scheme):
    """Rows in blocks of one type."""

    marker: str = field(default="weight", init=False)
    type: BlockType

    @property
    def resident_type(self) -> BlockType:
        """The type that it is kept in: its own, or eight bits where that has no product."""
        return EIGHT_BITS if self.type.name in KEPT_IN_EIGHT_BITS else self.type

    @property
    def resident_share(self) -> float:
        return self.read_share

    @property
    def read_share(self) -> float:
        own, kept = self.type, self.resident_type
        return kept.num_bytes / kept.num_values / (own.num_bytes / own.num_values)

    def takes(self, dtype: str) -> bool:
        return dtype == self.type.name

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        check_multiple("input", width_in, self.type.num_values)
        return {"weight": StoredTensor(((width_out, width_in),), (self.type.name,))}

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(self.resident_type.name, width_in, 32)

    def read(self, tensors: "Mapping[str, Tensor]") -> BlockWeight:
        codes, kept = tensors["weight"], self.resident_type
        if kept is not self.type:
            codes = to_eight_bits(self.type, codes)
        return BlockWeight.of(kept, codes)

    def write(self, weight: BlockWeight) -> "dict[str, Tensor]":
        return {"weight": weight.codes}


BLOCK_SCHEMES = tuple(map(Blocks, BLOCK_TYPES.values()))
