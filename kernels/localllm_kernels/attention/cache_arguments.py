"""A cache as the kernels of attention take it: its pointers, and how it is stored."""

import torch
from torch import Tensor

from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.compiling.launch import present

# How keys and values are stored: KIND of the kernels.
KINDS = {"plain": 0, "int8": 1, "fp8": 2}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
_KINDS = {torch.int8: KINDS["int8"], torch.float8_e4m3fn: KINDS["fp8"]}


def cache_kind(cache: KVCache) -> int:
    """How keys and values are stored: KIND of `attention/tiles.py`."""
    return _KINDS.get(cache.key.dtype, KINDS["plain"])


def cache_pointers(cache: KVCache) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Keys, values and their scales; if there are no scales, tensors that are not read."""
    key, value = cache.key, cache.value
    if key.dtype == torch.float8_e4m3fn:
        key, value = key.view(torch.uint8), value.view(torch.uint8)
    return key, value, present(cache.key_scales, key), present(cache.value_scales, value)
