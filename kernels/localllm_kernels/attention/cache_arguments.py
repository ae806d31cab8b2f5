"""A cache as the kernels of attention take it: its pointers, and how it is stored."""

import torch
from torch import Tensor

from localllm_kernels.attention.four_bits import FOUR_BITS, rotation_size
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.compiling.launch import present

# How keys and values are stored: KIND of the kernels.
KINDS = {"plain": 0, "int8": 1, "fp8": 2, "int4": 3}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": FOUR_BITS}
_KINDS = {dtype: KINDS[name] for name, dtype in CODES.items()}


def cache_kind(cache: KVCache) -> int:
    """How keys and values are stored: KIND of `attention/tiles.py`."""
    return _KINDS.get(cache.key.dtype, KINDS["plain"])


def cache_pointers(cache: KVCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and their scales, those of 16 bits in words of two; if there are no scales,
    tensors that are not read.
    """
    key, value = cache.key, cache.value
    key_scales, value_scales = present(cache.key_scales, key), present(cache.value_scales, value)
    if key.dtype == torch.float8_e4m3fn:
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    if cache.coding is not None:
        key_scales, value_scales = (
            scales.flatten().view(torch.int32) for scales in (key_scales, value_scales)
        )
    return key, value, key_scales, value_scales


def turning_arguments(cache: KVCache) -> dict[str, Tensor | int | bool]:
    """How queries and values are turned for a cache in 4 bits, as the kernels of attention take it;
    of another, what is not read.
    """
    coding, key = cache.coding, cache_pointers(cache)[0]
    return {
        "factors_ptr": key if coding is None else coding.factors,
        "means_ptr": key if coding is None else coding.means,
        "ROTATED": rotation_size(cache.head_dim),
        "VALUES_ARE_KEYS": cache.values_are_keys,
    }
