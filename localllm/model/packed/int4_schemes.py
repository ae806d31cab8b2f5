"""File formats of 4-bit weights: compressed-tensors, AWQ and GPTQ; see scheme.py."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from localllm.model.packed.int4 import Int4Weight, pack_nibbles, unpack_nibbles
from localllm.model.packed.scheme import (
    SCALE_DTYPES,
    Scheme,
    StoredTensor,
    check_multiple,
    count_groups,
)
from localllm_kernels.compiling.traits import WeightLayout

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def to_words(nibbles: Tensor) -> Tensor:
    """uint8 [rows, 8n] below 16 -> int32 [rows, n], the first column in the lowest bits."""
    return as_words(pack_nibbles(nibbles))


def as_words(values: Tensor) -> Tensor:
    """uint8 [rows, 4n] -> int32 [rows, n] of the same bits."""
    # A single row may count as contiguous yet have strides that a view as a wider type rejects.
    return values.reshape(-1).view(torch.int32).view(values.shape[0], -1)


def from_words(words: Tensor) -> Tensor:
    """The inverse of `to_words`."""
    return unpack_nibbles(words.contiguous().view(torch.uint8))


def _permutation_of(group_index: Tensor, group_size: int) -> Tensor | None:
    """Input features in the order of their groups, None if they already are in that order.

    Raises: ValueError where a group has not exactly `group_size` members.
    """
    num_groups = len(group_index) // group_size
    if group_index.min() < 0 or group_index.max() >= num_groups:
        raise ValueError(f"g_idx names a group outside 0 to {num_groups - 1}")
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
class _Int4Scheme(Scheme):
    group_size: int | None  # None: one group per row

    def layout(self, width_in: int) -> WeightLayout:
        return WeightLayout(Int4Weight.kind, width_in, self.group_size or width_in)


@dataclass(frozen=True, slots=True)
class PackedInt4(_Int4Scheme):
    """compressed-tensors `pack-quantized` with 4 bits."""

    symmetric: bool
    marker: str = field(default="weight_packed", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        check_multiple("input", width_in, 8)
        num_groups = count_groups(width_in, self.group_size)
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
        codes = tensors["weight_packed"].contiguous().view(torch.uint8)
        scales, zeros, permutation = tensors["weight_scale"], None, None
        if tensors["weight_shape"].tolist() != [codes.shape[0], 2 * codes.shape[1]]:
            raise ValueError(f"weight_shape does not match: {tensors['weight_shape'].tolist()}")
        if not self.symmetric:
            zeros = from_words(tensors["weight_zero_point"].T)[:, : len(codes)].T.contiguous()
        if "weight_g_idx" in tensors:
            size = 2 * codes.shape[1] // scales.shape[1]
            permutation = _permutation_of(tensors["weight_g_idx"].long(), size)
        if permutation is not None:
            codes = pack_nibbles(unpack_nibbles(codes)[:, permutation])
        return Int4Weight(codes, scales, zeros, permutation)

    def write(self, weight: Int4Weight) -> dict[str, Tensor]:
        if weight.permutation is not None:
            raise ValueError("a permuted weight cannot be written in this format")
        tensors = {
            "weight_packed": as_words(weight.codes),
            "weight_scale": weight.scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not self.symmetric:
            zeros = weight.explicit_zeros()
            padded = torch.nn.functional.pad(zeros, (0, 0, 0, -len(zeros) % 8))
            tensors["weight_zero_point"] = to_words(padded.T).T.contiguous()
        return tensors


@dataclass(frozen=True, slots=True)
class Awq(_Int4Scheme):
    """AutoAWQ's `gemm` layout."""

    marker: str = field(default="qweight", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        check_multiple("output", width_out, 8)
        num_groups = count_groups(width_in, self.group_size)
        return {
            "qweight": StoredTensor(((width_in, width_out // 8),), ("I32",)),
            "qzeros": StoredTensor(((num_groups, width_out // 8),), ("I32",)),
            "scales": StoredTensor(((num_groups, width_out),), SCALE_DTYPES),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Int4Weight:
        return Int4Weight(
            pack_nibbles(_from_awq(tensors["qweight"])),
            tensors["scales"].T.contiguous(),
            _from_awq(tensors["qzeros"]),
        )

    def write(self, weight: Int4Weight) -> dict[str, Tensor]:
        if weight.permutation is not None:
            raise ValueError("a permuted weight cannot be written in this format")
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
    columns = codes.T.reshape(codes.shape[1], -1, 8)
    return to_words(columns[..., list(_AWQ_ORDER)].flatten(1))


@dataclass(frozen=True, slots=True)
class Gptq(_Int4Scheme):
    """The layout of AutoGPTQ and GPTQModel, 4 bits."""

    is_v2: bool
    marker: str = field(default="qweight", init=False)

    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        check_multiple("output", width_out, 8)
        check_multiple("input", width_in, 8)
        num_groups = count_groups(width_in, self.group_size)
        return {
            "qweight": StoredTensor(((width_in // 8, width_out),), ("I32",)),
            "qzeros": StoredTensor(((num_groups, width_out // 8),), ("I32",)),
            "scales": StoredTensor(((num_groups, width_out),), SCALE_DTYPES),
            "g_idx": StoredTensor(((width_in,),), ("I32", "I64"), is_optional=True),
        }

    def read(self, tensors: Mapping[str, Tensor]) -> Int4Weight:
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
        # Symmetric checkpoints store a zero of 8 everywhere.
        is_symmetric = bool(torch.all(zeros == 8))
        own_zeros = None if is_symmetric else zeros.T.contiguous()
        return Int4Weight(pack_nibbles(codes), scales, own_zeros, permutation)

    def write(self, weight: Int4Weight) -> dict[str, Tensor]:
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
