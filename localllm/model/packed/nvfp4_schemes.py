"""File formats of NVFP4 weights; see scheme.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localllm.files.gguf import BLOCK_TYPES
from localllm.model.packed.int4 import pack_nibbles, unpack_nibbles
from localllm.model.packed.nvfp4 import GROUP_SIZE, Nvfp4Weight
from localllm.model.packed.scheme import Scheme, StoredTensor, check_multiple, count_groups
from localllm.model.packed.weight import input_scale
from localllm_kernels.compiling.traits import WeightLayout

_BLOCK = BLOCK_TYPES[40]
_ONE_NUMBER = StoredTensor(((1,), ()), ("F32",))
_OPTIONAL_NUMBER = StoredTensor(((1,), ()), ("F32",), is_optional=True)


class _Nvfp4(Scheme):
    """What the formats share."""

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(Nvfp4Weight.kind, width_in, GROUP_SIZE)


@dataclass(frozen=True, slots=True)
class PackedNvfp4(_Nvfp4):
    """compressed-tensors `nvfp4-pack-quantized`, whose global scale divides."""

    marker: str = field(default="weight_packed", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        return {
            "weight_packed": _codes(width_out, width_in),
            "weight_scale": _scales(width_out, width_in),
            "weight_global_scale": _ONE_NUMBER,
            # For inputs in 4 bits.
            "input_global_scale": _OPTIONAL_NUMBER,
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Nvfp4Weight:
        divisor = tensors.get("input_global_scale")
        return _weight(
            tensors["weight_packed"],
            tensors["weight_scale"],
            tensors["weight_global_scale"],
            None if divisor is None else 1 / divisor,
        )

    def write(self, weight: Nvfp4Weight) -> dict[str, Tensor]:
        return {
            "weight_packed": weight.codes,
            "weight_scale": weight.scales,
            "weight_global_scale": weight.divisors[:1].clone(),
        }


@dataclass(frozen=True, slots=True)
class ModelOptNvfp4(_Nvfp4):
    """modelopt's, whose second scale multiplies."""

    marker: str = field(default="weight_scale_2", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        return {
            "weight": _codes(width_out, width_in),
            "weight_scale": _scales(width_out, width_in),
            "weight_scale_2": _ONE_NUMBER,
            "input_scale": _OPTIONAL_NUMBER,
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Nvfp4Weight:
        scale, whole = tensors["weight_scale"], 1 / tensors["weight_scale_2"]
        return _weight(tensors["weight"], scale, whole, tensors.get("input_scale"))

    def write(self, weight: Nvfp4Weight) -> dict[str, Tensor]:
        return {
            "weight": weight.codes,
            "weight_scale": weight.scales,
            "weight_scale_2": 1 / weight.divisors[0],
        }


@dataclass(frozen=True, slots=True)
class GgufNvfp4(_Nvfp4):
    """Blocks of 64: four scales, then for each 16 codes eight bytes, in whose low halves the first
    eight lie. Beside them may lie a scale of the tensor, which multiplies.
    """

    marker: str = field(default="weight", init=False)

    @property
    def resident_share(self) -> float:
        return 1.0

    def takes(self, dtype: str) -> bool:
        return dtype == _BLOCK.name

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        check_multiple("input", width_in, _BLOCK.num_values)
        return {
            "weight": StoredTensor(((width_out, width_in),), (_BLOCK.name,)),
            "scale": _OPTIONAL_NUMBER,
            "input_scale": _OPTIONAL_NUMBER,
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Nvfp4Weight:
        codes = tensors["weight"]
        blocks = codes.view(len(codes), -1, _BLOCK.num_bytes)
        halves = blocks[:, :, 4:].reshape(len(codes), -1, GROUP_SIZE // 2)
        nibbles = torch.cat((halves & 15, halves >> 4), dim=2).flatten(1)
        # The sign of a scale means nothing, and what is not a number is zero.
        bits = (blocks[:, :, :4] & 127).flatten(1)
        scales = torch.where(bits == 127, 0, bits).view(torch.float8_e4m3fn)
        scale = tensors.get("scale", torch.ones(1, device=codes.device))
        return _weight(pack_nibbles(nibbles), scales, 1 / scale)

    def write(self, weight: Nvfp4Weight) -> dict[str, Tensor]:
        groups = unpack_nibbles(weight.codes).view(len(weight.codes), -1, 2, GROUP_SIZE // 2)
        halves = (groups[:, :, 0] | groups[:, :, 1] << 4).view(len(weight.codes), -1, 32)
        scales = weight.scales.view(torch.uint8).view(len(weight.codes), -1, 4)
        return {
            "weight": torch.cat((scales, halves), dim=2).flatten(1),
            "scale": 1 / weight.divisors[:1],
        }


def _codes(width_out: int, width_in: int) -> StoredTensor:
    check_multiple("input", width_in, 2)
    return StoredTensor(((width_out, width_in // 2),), ("U8",))


def _scales(width_out: int, width_in: int) -> StoredTensor:
    return StoredTensor(((width_out, count_groups(width_in, GROUP_SIZE)),), ("F8_E4M3",))


def _weight(
    codes: Tensor, scales: Tensor, divisor: Tensor, of_inputs: Tensor | None = None
) -> Nvfp4Weight:
    """Raises: ValueError for scales that are not numbers, or infinite."""
    if bool((scales.view(torch.uint8) & 127 == 127).any()):
        raise ValueError("a scale is NaN")
    if not (torch.isfinite(divisor).all() and (divisor > 0).all()):
        raise ValueError("a global scale is not a positive number")
    divisors = divisor.reshape(1).expand(len(codes)).contiguous()
    return Nvfp4Weight(codes, scales, divisors, input_scale(of_inputs))
