"""A cache as the kernels of attention take it: its pointers, and how it is stored."""

import torch
from torch import Tensor

from localllm_kernels.attention.four_bits import FOUR_BITS, rotation_size
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.paged_attention import AttentionArguments
from localllm_kernels.compiling.launch import Workspace, present

# How keys and values are stored: KIND of the kernels.
KINDS = {"plain": 0, "int8": 1, "fp8": 2, "int4": 3}
CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": FOUR_BITS}
# Which keys a launch is over: OWN of the kernels. The first of two over a cache in 4 bits leaves
# what queries have of their own keys, with which the second ends.
ALL_KEYS, OTHER_KEYS, OWN_ONLY = 0, 1, 2
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


def own_buffer(
    query: Tensor, cache: KVCache, workspace: Workspace, how: AttentionArguments
) -> Tensor | None:
    """Room for what queries have of their own keys, see `leave_own`; None where those have no cache
    of their own.
    """
    if cache.newest is None or how.get("newest_tables") is None:
        return None
    num_tokens, heads, head_dim = query.shape
    return workspace.own(num_tokens * heads * ((how.get("value_dim") or head_dim) + 4))


def own_launch(cache: KVCache, how: AttentionArguments) -> tuple[KVCache, AttentionArguments]:
    """The cache of own keys, and how it is read: sinks count in the other launch."""
    newest, tables = cache.newest, how.get("newest_tables")
    assert newest is not None
    assert tables is not None
    return newest, {**how, "block_tables": tables, "sinks": None}
