"""File formats of MXFP4 weights; see scheme.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from localllm.model.packed.mxfp4 import GROUP_SIZE, NAN, Mxfp4Weight
from localllm.model.packed.scheme import Scheme, StoredTensor, count_groups
from localllm_kernels.compiling.traits import WeightLayout


@dataclass(frozen=True, slots=True)
class PackedMxfp4(Scheme):
    """compressed-tensors `mxfp4-pack-quantized`."""

    marker: str = field(default="weight_packed", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        num_groups = count_groups(width_in, GROUP_SIZE)
        return {
            "weight_packed": StoredTensor(((width_out, width_in // 2),), ("U8",)),
            "weight_scale": StoredTensor(((width_out, num_groups),), ("U8",)),
        }

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(Mxfp4Weight.kind, width_in, GROUP_SIZE)

    def read(self, tensors: Mapping[str, Tensor]) -> Mxfp4Weight:
        return _checked(Mxfp4Weight(tensors["weight_packed"], tensors["weight_scale"]))

    def write(self, weight: Mxfp4Weight) -> dict[str, Tensor]:
        return {"weight_packed": weight.codes, "weight_scale": weight.exponents}


@dataclass(frozen=True, slots=True)
class BlocksMxfp4(Scheme):
    """gpt-oss: `blocks` of 16 bytes for each scale."""

    marker: str = field(default="blocks", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        num_groups = count_groups(width_in, GROUP_SIZE)
        return {
            "blocks": StoredTensor(((width_out, num_groups, GROUP_SIZE // 2),), ("U8",)),
            "scales": StoredTensor(((width_out, num_groups),), ("U8",)),
        }

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(Mxfp4Weight.kind, width_in, GROUP_SIZE)

    def read(self, tensors: Mapping[str, Tensor]) -> Mxfp4Weight:
        return _checked(Mxfp4Weight(tensors["blocks"].flatten(1), tensors["scales"]))

    def write(self, weight: Mxfp4Weight) -> dict[str, Tensor]:
        blocks = weight.codes.view(*weight.exponents.shape, GROUP_SIZE // 2)
        return {"blocks": blocks, "scales": weight.exponents}


def _checked(weight: Mxfp4Weight) -> Mxfp4Weight:
    if bool((weight.exponents == NAN).any()):
        raise ValueError("a scale is NaN")
    return weight
