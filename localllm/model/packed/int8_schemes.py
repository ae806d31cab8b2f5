"""File formats of 8-bit weights; see scheme.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localllm.model.packed.int4_schemes import as_words
from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.scheme import SCALE_DTYPES, Scheme, StoredTensor, check_multiple
from localllm_kernels.compiling.traits import WeightLayout


@dataclass(frozen=True, slots=True)
class PackedInt8(Scheme):
    """compressed-tensors `pack-quantized` with 8 bits and one scale per row."""

    marker: str = field(default="weight_packed", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        check_multiple("input", width_in, 4)
        return {
            "weight_packed": StoredTensor(((width_out, width_in // 4),), ("I32",)),
            "weight_scale": StoredTensor(((width_out, 1),), SCALE_DTYPES),
            "weight_shape": StoredTensor(((2,),), ("I64", "I32")),
        }

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(Int8Weight.kind, width_in, width_in)

    def read(self, tensors: Mapping[str, Tensor]) -> Int8Weight:
        stored = tensors["weight_packed"].contiguous().view(torch.uint8)
        # value + 128 as an unsigned byte is the signed byte with its highest bit flipped.
        return Int8Weight((stored ^ 128).view(torch.int8), tensors["weight_scale"].flatten())

    def write(self, weight: Int8Weight) -> dict[str, Tensor]:
        return {
            "weight_packed": as_words(weight.codes.view(torch.uint8) ^ 128),
            "weight_scale": weight.scales[:, None].contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }


@dataclass(frozen=True, slots=True)
class PlainInt8(Scheme):
    """compressed-tensors `int-quantized`: plain signed bytes with one scale per row."""

    marker: str = field(default="weight_scale", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        return {
            "weight": StoredTensor(((width_out, width_in),), ("I8",)),
            "weight_scale": StoredTensor(((width_out, 1),), SCALE_DTYPES),
        }

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(Int8Weight.kind, width_in, width_in)

    def read(self, tensors: Mapping[str, Tensor]) -> Int8Weight:
        return Int8Weight(tensors["weight"], tensors["weight_scale"].flatten())

    def write(self, weight: Int8Weight) -> dict[str, Tensor]:
        return {"weight": weight.codes, "weight_scale": weight.scales[:, None].contiguous()}
