"""File formats of e4m3 weights; see scheme.py."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from localllm.model.packed.fp8 import Fp8Weight
from localllm.model.packed.scheme import SCALE_DTYPES, Scheme, Shape, StoredTensor
from localllm.model.packed.weight import input_scale
from localllm_kernels.compiling.traits import WeightLayout


@dataclass(frozen=True, slots=True)
class Fp8(Scheme):
    """e4m3 with one scale per row or one for all (`block` None), or with one per block.

    `marker` is the scale's suffix: `weight_scale`, or `weight_scale_inv` (which is not an inverse).
    """

    block: tuple[int, int] | None

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        shapes: tuple[Shape, ...] = ((width_out, 1), (1,), ())
        if self.block is not None:
            shapes = ((-(-width_out // self.block[0]), -(-width_in // self.block[1])),)
        return {
            "weight": StoredTensor(((width_out, width_in),), ("F8_E4M3",)),
            self.marker: StoredTensor(shapes, SCALE_DTYPES),
            # Of inputs in e4m3, by either name.
            "input_scale": StoredTensor(((1,), ()), SCALE_DTYPES, is_optional=True),
            "activation_scale": StoredTensor(((1,), ()), SCALE_DTYPES, is_optional=True),
        }

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(
            Fp8Weight.kind, width_in, width_in if self.block is None else self.block[1]
        )

    def read(self, tensors: Mapping[str, Tensor]) -> Fp8Weight:
        codes, scales, block = tensors["weight"], tensors[self.marker], self.block
        of_inputs = input_scale(tensors.get("input_scale", tensors.get("activation_scale")))
        if block is None:
            scales, block = scales.reshape(-1, 1).expand(len(codes), 1), (1, codes.shape[1])
        return Fp8Weight(codes, scales.contiguous(), block, of_inputs)

    def write(self, weight: Fp8Weight) -> dict[str, Tensor]:
        return {"weight": weight.codes, self.marker: weight.scales}
