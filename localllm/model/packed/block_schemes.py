"""The types of GGUF's blocks as formats of a linear: one tensor, whose dtype names its type."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from localllm.files.gguf import BLOCK_TYPES, BlockType
from localllm.model.packed.scheme import Scheme, StoredTensor, check_multiple
from localllm_kernels.compiling.traits import WeightLayout

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.packed.blocks import BlockWeight


@dataclass(frozen=True, slots=True)
class Blocks(Scheme):
    """Rows in blocks of one type."""

    resident_share: ClassVar[float] = 1.0

    marker: str = field(default="weight", init=False)
    type: BlockType

    def takes(self, dtype: str) -> bool:
        return dtype == self.type.name

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        check_multiple("input", width_in, self.type.num_values)
        return {"weight": StoredTensor(((width_out, width_in),), (self.type.name,))}

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(self.type.name, width_in, 32)

    def read(self, tensors: "Mapping[str, Tensor]") -> "BlockWeight":
        from localllm.model.packed.blocks import BlockWeight

        return BlockWeight.of(self.type, tensors["weight"])

    def write(self, weight: "BlockWeight") -> "dict[str, Tensor]":
        return {"weight": weight.codes}


BLOCK_SCHEMES = tuple(map(Blocks, BLOCK_TYPES.values()))
