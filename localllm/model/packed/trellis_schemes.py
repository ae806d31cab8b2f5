"""The file format of weights on a trellis; see scheme.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from localllm.model.packed.scheme import Scheme, StoredTensor, check_multiple
from localllm.model.packed.trellis import TrellisWeight
from localllm_kernels.compiling.traits import WeightLayout
from localllm_kernels.trellis import BYTES, IN_BYTES

# Inputs that a product takes at a time.
_UNIT = 16


@dataclass(frozen=True, slots=True)
class Trellis(Scheme):
    """localllm's own: the bits of each row, and its scale."""

    marker: str = field(default="weight_trellis", init=False)

    @property
    def resident_share(self) -> float:
        """Rows are packed in blocks of vectors, with one byte more for each."""
        return 1.02

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        check_multiple("input", width_in, _UNIT)
        return {
            "weight_trellis": StoredTensor(((width_out, width_in // IN_BYTES * BYTES),), ("U8",)),
            "weight_scale": StoredTensor(((width_out, 1),), ("F32",)),
        }

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(TrellisWeight.kind, width_in, width_in)

    def read(self, tensors: Mapping[str, Tensor]) -> TrellisWeight:
        return TrellisWeight(tensors["weight_trellis"], tensors["weight_scale"].flatten())

    def write(self, weight: TrellisWeight) -> dict[str, Tensor]:
        return {
            "weight_trellis": weight.codes,
            "weight_scale": weight.scales[:, None].contiguous(),
        }
