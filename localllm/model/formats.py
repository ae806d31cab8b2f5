"""The file formats of quantized checkpoints: how each is told, read and written.

A format turns the tensors of one linear into a weight of `quantized.py` and back; nothing behind
this file knows which one it was. Layouts, for a linear of `out` × `in` in groups of g:

- compressed-tensors (its package, `compressors/pack_quantized` and `naive_quantized`, 0.20):
  `weight_packed` int32 [out, in/8], nibble i of a word is column 8j + i, stored as value + 8;
  `weight_scale` [out, in/g]; `weight_zero_point` int32 [out/8, in/g], packed along the output;
  `weight_shape` int64 [2]; `weight_g_idx` int32 [in]. 8 bits: [out, in/4], stored as value + 128.
  fp8 (`float-quantized`): `weight` e4m3 [out, in], `weight_scale` [out, 1] or by blocks.
- AWQ (AutoAWQ 0.2, `gemm`): `qweight` int32 [in, out/8] and `qzeros` [in/g, out/8], in which
  nibble i of a word is column 8j + (0, 2, 4, 6, 1, 3, 5, 7)[i]; `scales` float16 [in/g, out].
- GPTQ (AutoGPTQ, GPTQModel): `qweight` int32 [in/8, out], packed along the input; `qzeros`
  [in/g, out/8]; `scales` [in/g, out]; `g_idx` int32 [in], the group of each input feature. The
  first version of the format stores zero - 1, `gptq_v2` the zero itself.
- fp8 (the hub's DeepSeek and Qwen3 checkpoints): `weight` e4m3 and `weight_scale_inv` by blocks,
  or `weight_scale`, one for all.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from localllm.model.quantized import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    pack_nibbles,
    unpack_nibbles,
)

SCALE_DTYPES = ("F16", "BF16", "F32")
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file must hold under one suffix: the shapes and the dtypes that are taken."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False


class Scheme(Protocol):
    """How one linear is quantized in one format."""

    @property
    def marker(self) -> str:
        """The suffix whose presence tells that a linear is quantized."""

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        """The tensors of a linear of that shape, by suffix. Raises: ValueError if none fits."""

    def read(self, tensors: Mapping[str, Tensor]) -> QuantizedWeight:
        """The weight from its tensors, by suffix. Raises: ValueError where they make no sense."""

    def write(self, weight: Any) -> dict[str, Tensor]:
        """The tensors of a weight, by suffix: the inverse of `read`."""


def _groups(width_in: int, group_size: int | None) -> int:
    size = group_size or width_in
    if width_in % size:
        raise ValueError(f"its input width {width_in} is not a multiple of the group {size}")
    return width_in // size


def _check_multiple(name: str, width: int, factor: int) -> None:
    if width % factor:
        raise ValueError(f"its {name} width {width} is not a multiple of {factor}")


def to_words(nibbles: Tensor) -> Tensor:
    """uint8 [rows, 8n] below 16 -> int32 [rows, n], the first column in the lowest bits."""
    return _as_words(pack_nibbles(nibbles))


def _as_words(values: Tensor) -> Tensor:
    """uint8 [rows, 4n] -> int32 [rows, n] of the same bits."""
    # One row may count as contiguous with strides that a view with wider items refuses.
    return values.reshape(-1).view(torch.int32).view(values.shape[0], -1)


def from_words(words: Tensor) -> Tensor:
    """The inverse of `to_words`."""
    return unpack_nibbles(words.contiguous().view(torch.uint8))


def _permutation_of(group_index: Tensor, group_size: int) -> Tensor | None:
    """Input features in the order of their groups, None where they already are.

    Raises: ValueError where a group has not exactly `group_size` members.
    """
    num_groups = len(group_index) // group_size
    if group_index.min() < 0 or group_index.max() >= num_groups:
        raise ValueError(f"g_idx names a group that is none of 0 to {num_groups - 1}")
    counts = torch.bincount(group_index, minlength=num_groups)
    if not torch.all(counts == group_size):
        raise ValueError(f"g_idx does not give every group {group_size} features")
    if torch.all(group_index[1:] >= group_index[:-1]):
        return None
    return torch.sort(group_index, stable=True).indices


def _group_index_of(permutation: Tensor | None, width_in: int, group_size: int) -> Tensor:
    groups = torch.arange(width_in, dtype=torch.int32) // group_size
    if permutation is None:
        return groups
    index = torch.empty_like(groups)
    index[permutation] = groups
    return index


@dataclass(frozen=True, slots=True)
class PackedInt4:
    """compressed-tensors `pack-quantized` with 4 bits."""

    group_size: int | None  # None: one group a row
    symmetric: bool
    marker: str = field(default="weight_packed", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        """See Scheme."""
        _check_multiple("input", width_in, 8)
        num_groups = _groups(width_in, self.group_size)
        tensors = {
            "weight_packed": StoredTensor(((width_out, width_in // 8),), ("I32",)),
            "weight_scale": StoredTensor(((width_out, num_groups),), SCALE_DTYPES),
            "weight_shape": StoredTensor(((2,),), ("I64", "I32")),
            "weight_g_idx": StoredTensor(((width_in,),), ("I32", "I64"), is_optional=True),
        }
        if not self.symmetric:
            packed_rows = -(-width_out // 8)
            tensors["weight_zero_point"] = StoredTensor(((packed_rows, num_groups),), ("I32",))
        return tensors

    def read(self, tensors: Mapping[str, Tensor]) -> Int4Weight:
        """See Scheme."""
        codes = tensors["weight_packed"].contiguous().view(torch.uint8)
        scales, zeros, permutation = tensors["weight_scale"], None, None
        if tensors["weight_shape"].tolist() != [codes.shape[0], 2 * codes.shape[1]]:
            raise ValueError(f"weight_shape says {tensors['weight_shape'].tolist()}")
        if not self.symmetric:
            zeros = from_words(tensors["weight_zero_point"].T)[:, : len(codes)].T.contiguous()
        if "weight_g_idx" in tensors:
            size = 2 * codes.shape[1] // scales.shape[1]
            permutation = _permutation_of(tensors["weight_g_idx"].long(), size)
        if permutation is not None:
            codes = pack_nibbles(unpack_nibbles(codes)[:, permutation])
        return Int4Weight(codes, scales, zeros, permutation)

    def write(self, weight: Int4Weight) -> dict[str, Tensor]:
        """See Scheme."""
        if weight.permutation is not None:
            raise ValueError("a permuted weight is not written in this format")
        tensors = {
            "weight_packed": _as_words(weight.codes),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not self.symmetric:
            zeros = weight.explicit_zeros()
            padded = torch.nn.functional.pad(zeros, (0, 0, 0, -len(zeros) % 8))
            tensors["weight_zero_point"] = to_words(padded.T).T.contiguous()
        return tensors


@dataclass(frozen=True, slots=True)
class PackedInt8:
    """compressed-tensors `pack-quantized` with 8 bits and a scale for each row."""

    marker: str = field(default="weight_packed", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        """See Scheme."""
        _check_multiple("input", width_in, 4)
        return {
            "weight_packed": StoredTensor(((width_out, width_in // 4),), ("I32",)),
            "weight_scale": StoredTensor(((width_out, 1),), SCALE_DTYPES),
            "weight_shape": StoredTensor(((2,),), ("I64", "I32")),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Int8Weight:
        """See Scheme."""
        stored = tensors["weight_packed"].contiguous().view(torch.uint8)
        # value + 128 as an unsigned byte is the signed byte with its highest bit turned.
        return Int8Weight((stored ^ 128).view(torch.int8), tensors["weight_scale"].flatten())

    def write(self, weight: Int8Weight) -> dict[str, Tensor]:
        """See Scheme."""
        return {
            "weight_packed": _as_words(weight.codes.view(torch.uint8) ^ 128),
            "weight_scale": weight.scales[:, None].contiguous(),
            "weight_shape": torch.tensor(weight.shape),
        }


@dataclass(frozen=True, slots=True)
class Awq:
    """AutoAWQ's `gemm` layout."""

    group_size: int | None
    marker: str = field(default="qweight", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        """See Scheme."""
        _check_multiple("output", width_out, 8)
        num_groups = _groups(width_in, self.group_size)
        return {
            "qweight": StoredTensor(((width_in, width_out // 8),), ("I32",)),
            "qzeros": StoredTensor(((num_groups, width_out // 8),), ("I32",)),
            "scales": StoredTensor(((num_groups, width_out),), SCALE_DTYPES),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Int4Weight:
        """See Scheme."""
        return Int4Weight(
            pack_nibbles(_from_awq(tensors["qweight"])),
            tensors["scales"].T.contiguous(),
            _from_awq(tensors["qzeros"]),
        )

    def write(self, weight: Int4Weight) -> dict[str, Tensor]:
        """See Scheme."""
        if weight.permutation is not None:
            raise ValueError("a permuted weight is not written in this format")
        return {
            "qweight": _to_awq(unpack_nibbles(weight.codes)),
            "qzeros": _to_awq(weight.explicit_zeros()),
            "scales": weight.scales.T.contiguous().half(),
        }


def _from_awq(words: Tensor) -> Tensor:
    """int32 [rows, out/8] -> uint8 [out, rows]."""
    stored = from_words(words).view(words.shape[0], -1, 8)
    columns = torch.empty_like(stored)
    columns[..., list(_AWQ_ORDER)] = stored
    return columns.flatten(1).T.contiguous()


def _to_awq(codes: Tensor) -> Tensor:
    """The inverse of `_from_awq`."""
    columns = codes.T.reshape(codes.shape[1], -1, 8)
    return to_words(columns[..., list(_AWQ_ORDER)].flatten(1))


@dataclass(frozen=True, slots=True)
class Gptq:
    """The layout of AutoGPTQ and GPTQModel, 4 bits."""

    group_size: int | None
    is_v2: bool
    marker: str = field(default="qweight", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        """See Scheme."""
        _check_multiple("output", width_out, 8)
        _check_multiple("input", width_in, 8)
        num_groups = _groups(width_in, self.group_size)
        return {
            "qweight": StoredTensor(((width_in // 8, width_out),), ("I32",)),
            "qzeros": StoredTensor(((num_groups, width_out // 8),), ("I32",)),
            "scales": StoredTensor(((num_groups, width_out),), SCALE_DTYPES),
            "g_idx": StoredTensor(((width_in,),), ("I32", "I64"), is_optional=True),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Int4Weight:
        """See Scheme."""
        codes = from_words(tensors["qweight"].T)
        zeros = from_words(tensors["qzeros"])
        if not self.is_v2:
            zeros = (zeros + 1) & 15
        scales, permutation = tensors["scales"].T.contiguous(), None
        if "g_idx" in tensors:
            size = codes.shape[1] // scales.shape[1]
            permutation = _permutation_of(tensors["g_idx"].long(), size)
        if permutation is not None:
            codes = codes[:, permutation]
        # A zero of 8 everywhere is what a symmetric checkpoint says in a roundabout way.
        is_symmetric = bool(torch.all(zeros == 8))
        own_zeros = None if is_symmetric else zeros.T.contiguous()
        return Int4Weight(pack_nibbles(codes), scales, own_zeros, permutation)

    def write(self, weight: Int4Weight) -> dict[str, Tensor]:
        """See Scheme."""
        codes = unpack_nibbles(weight.codes)
        if weight.permutation is not None:
            ordered = torch.empty_like(codes)
            ordered[:, weight.permutation] = codes
            codes = ordered
        zeros = weight.explicit_zeros()
        if not self.is_v2:
            if not torch.all(zeros > 0):
                raise ValueError("the first version of the format cannot hold a zero of 0")
            zeros = zeros - 1
        return {
            "qweight": to_words(codes).T.contiguous(),
            "qzeros": to_words(zeros.T),
            "scales": weight.scales.T.contiguous().half(),
            "g_idx": _group_index_of(weight.permutation, weight.shape[1], weight.group_size),
        }


@dataclass(frozen=True, slots=True)
class PlainInt8:
    """compressed-tensors `int-quantized`: signed bytes as they are, a scale for each row."""

    marker: str = field(default="weight_scale", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        """See Scheme."""
        return {
            "weight": StoredTensor(((width_out, width_in),), ("I8",)),
            "weight_scale": StoredTensor(((width_out, 1),), SCALE_DTYPES),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Int8Weight:
        """See Scheme."""
        return Int8Weight(tensors["weight"], tensors["weight_scale"].flatten())

    def write(self, weight: Int8Weight) -> dict[str, Tensor]:
        """See Scheme."""
        return {"weight": weight.codes, "weight_scale": weight.scales[:, None].contiguous()}


@dataclass(frozen=True, slots=True)
class Fp8:
    """e4m3 with scales by rows or one for all (`block` None), or by blocks.

    `marker` is the scale's suffix: `weight_scale`, or `weight_scale_inv` (which is no inverse).
    """

    marker: str
    block: tuple[int, int] | None

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        """See Scheme."""
        shapes: tuple[Shape, ...] = ((width_out, 1), (1,), ())
        if self.block is not None:
            shapes = ((-(-width_out // self.block[0]), -(-width_in // self.block[1])),)
        return {
            "weight": StoredTensor(((width_out, width_in),), ("F8_E4M3",)),
            self.marker: StoredTensor(shapes, SCALE_DTYPES),
            # The scale of activations quantized ahead of time; ours are not quantized.
            "input_scale": StoredTensor(((1,), ()), SCALE_DTYPES, is_optional=True),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Fp8Weight:
        """See Scheme."""
        codes, scales = tensors["weight"], tensors[self.marker]
        if self.block is not None:
            return Fp8Weight(codes, scales, self.block)
        rows = scales.reshape(-1, 1).expand(codes.shape[0], 1).contiguous()
        return Fp8Weight(codes, rows, (1, codes.shape[1]))

    def write(self, weight: Fp8Weight) -> dict[str, Tensor]:
        """See Scheme."""
        return {"weight": weight.codes, self.marker: weight.scales}
