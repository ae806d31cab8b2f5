"""The paged keys and values of a layer: plain, or in 8 bits with one scale per token and head.
In 4 bits they are rotated first, see four_bits.py.

    value ≈ code · scale,   scale = max |row| / (greatest code)

Codes are int8 up to 127, rounded half to even, or e4m3 (4 bits of exponent, 3 of mantissa) up to
448. Each row is rounded by itself, so a token's keys and values have the same bits in any batch.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm_kernels.attention.four_bits import (
    FOUR_BITS,
    KeyCoding,
    dequantize_keys,
    dequantize_values,
    pack_halves,
    quantize_keys,
    quantize_values,
)

# The greatest code of each 8-bit type.
CODE_LIMITS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


@dataclass(frozen=True, slots=True)
class KVCache:
    """Keys and values, [num_blocks, num_kv_heads, block_size, head_dim] each, so that the keys of
    one head in a block are contiguous; block 0 is the null block, which is never written. Where
    values are the keys, both are the same memory.

    Scales: [num_blocks, num_kv_heads, block_size], float32, or bfloat16 in 4 bits; None where the
    values are plain. `coding`: of keys in 4 bits, whose last dimension is half of head_dim.
    `key_means`: float32 [num_kv_heads, head_dim], which keys in 8 bits are stored without; no score
    is compared with anything but those of other keys then. `uncoded`: beside 4 bits, keys and
    values as they were, of which a query meets its own, see OWN_KEYS; it has its own block tables.

    `is_turned`: the memory of a block has the keys of a head side by side, so that a product with
    them needs no sum across a vector: float32 [head_dim, block_size], the others in pairs [head_dim
    / 2, block_size, 2]; and values, but for float32, with those of two tokens together, [block_size
    / 2, head_dim, 2]. In 4 bits: bytes, [head_dim / 8, block_size, 4], whose low halves are the
    first four of eight numbers, and [block_size / 4, head_dim / 2, 4]. `rows` has them as the
    shapes say.
    """

    key: Tensor
    value: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None
    is_turned: bool = False
    coding: KeyCoding | None = None
    key_means: Tensor | None = None
    uncoded: "KVCache | None" = None

    @property
    def head_dim(self) -> int:
        """Numbers of a key."""
        return self.key.shape[-1] * (1 if self.coding is None else 2)

    @property
    def values_are_keys(self) -> bool:
        """Whether values are the keys, in the same memory."""
        return self.value.data_ptr() == self.key.data_ptr()

    def layer(self, index: int) -> "KVCache":
        """One layer of caches whose tensors have a first dimension of layers."""
        return replace(
            self,
            key=self.key[index],
            value=self.value[index],
            key_scales=None if self.key_scales is None else self.key_scales[index],
            value_scales=None if self.value_scales is None else self.value_scales[index],
            coding=None if self.coding is None else self.coding.layer(index),
            key_means=None if self.key_means is None else self.key_means[index],
            uncoded=None if self.uncoded is None else self.uncoded.layer(index),
        )

    @property
    def rows(self) -> "KVCache":
        """The same, not turned; a copy if it is."""
        if not self.is_turned:
            return self
        shape = self.key.shape
        *outer, size, width = shape
        if self.coding is not None:
            eights = self.key.reshape(*outer, width // 4, size, 4).transpose(-2, -3)
            key = pack_halves(torch.cat((eights & 15, eights >> 4), dim=-1).flatten(-2))
            fours = self.value.reshape(*outer, size // 4, width, 4).transpose(-1, -2)
            uncoded = None if self.uncoded is None else self.uncoded.rows
            return replace(
                self, key=key, value=fours.reshape(shape), is_turned=False, uncoded=uncoded
            )
        if self.key.dtype == torch.float32:
            key, value = self.key.reshape(*outer, width, size).transpose(-1, -2), self.value
        else:
            keys = self.key.reshape(*outer, width // 2, size, 2).transpose(-2, -3)
            values = self.value.reshape(*outer, size // 2, width, 2).transpose(-1, -2)
            key, value = keys.reshape(shape), values.reshape(shape)
        return replace(self, key=key.contiguous(), value=value.contiguous(), is_turned=False)


def is_turnable(block_size: int, head_dim: int, dtype: torch.dtype) -> bool:
    """Whether whole vectors of keys and of values lie in a block."""
    types = (torch.float32, torch.bfloat16, FOUR_BITS, *CODE_LIMITS)
    vector = 32 if dtype == FOUR_BITS else 16
    return dtype in types and block_size % 16 == 0 and head_dim % vector == 0


def row_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Bytes of a key (or value) of one token and head in `dtype`, including its scale."""
    if dtype == FOUR_BITS:
        return head_dim // 2 + torch.bfloat16.itemsize
    return head_dim * dtype.itemsize + (torch.float32.itemsize if dtype in CODE_LIMITS else 0)


def quantize_rows(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rows`: [..., width] -> codes of `dtype`, one of `CODE_LIMITS`, and float32 scales [...]."""
    limit = CODE_LIMITS[dtype]
    wide = rows.float()
    largest = wide.abs().amax(dim=-1)
    # A number divided by a tensor would be number times reciprocal, which is rounded twice.
    factors = torch.where(largest > 0, torch.full_like(largest, limit) / largest, 0.0)
    scaled = (wide * factors.unsqueeze(-1)).clamp(-limit, limit)
    codes = scaled.round() if dtype == torch.int8 else scaled
    return codes.to(dtype), largest / limit


def coded_rows(
    rows: Tensor, dtype: torch.dtype, coding: KeyCoding | None, *, are_keys: bool
) -> tuple[Tensor, Tensor]:
    """`rows`: [tokens, kv_heads, head_dim] as a cache of `dtype` has them, and their scales."""
    if dtype != FOUR_BITS:
        return quantize_rows(rows, dtype)
    assert coding is not None
    return quantize_keys(rows, coding) if are_keys else quantize_values(rows)


def plain_rows(
    codes: Tensor, scales: Tensor, coding: KeyCoding | None, *, are_keys: bool
) -> Tensor:
    """The inverse, float32, of [..., kv_heads, block_size, numbers]."""
    if codes.dtype != FOUR_BITS:
        return dequantize_rows(codes, scales)
    assert coding is not None
    return dequantize_keys(codes, scales, coding) if are_keys else dequantize_values(codes, scales)


def dequantize_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """The inverse of `quantize_rows`, float32."""
    return codes.float() * scales.unsqueeze(-1)
