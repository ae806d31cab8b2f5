"""The operations between the query-key-value product and attention, as one operator.

Queries and keys are normed head by head if the model does so (Qwen3), and rotated by their
positions; the new keys and values are written to their slots of the paged cache. Values may be
normed too, without a weight, and may be the keys before their norm and rotation (Gemma 4).
"""

from torch import Tensor

from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.rotary import apply_rotary_reference
from localllm_kernels.attention.store_kv import store_kv_reference
from localllm_kernels.pointwise.rms_norm import rms_norm_reference


def rotate_and_store_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: KVCache | None,
    slot_mapping: Tensor,
    *,
    query_norm: Tensor | None = None,
    key_norm: Tensor | None = None,
    eps: float = 0.0,
    has_values: bool = True,
    norms_values: bool = False,
    uncoded_slots: Tensor | None = None,
) -> Tensor:
    """The queries, [num_tokens, num_heads, head_dim].

    `qkv`: [num_tokens, num_heads + 2 · num_kv_heads, head_dim], without the last num_kv_heads if
    not `has_values` (keys are values then), and the queries alone without a `cache`; `cos`, `sin`:
    float32 [num_tokens, head_dim / 2]; `cache` is changed in place; norms: [head_dim] each, both or
    neither. Rows after those of `slot_mapping` are padding; `uncoded_slots`: those in
    `cache.uncoded`.
    """
    kv_heads = 0 if cache is None else cache.key.shape[1]
    heads = qkv.shape[1] - (2 if has_values else 1) * kv_heads
    query, key, value = qkv[:, :heads], qkv[:, heads : heads + kv_heads], qkv[:, -kv_heads:]
    if query_norm is not None:
        query = rms_norm_reference(query, query_norm, eps)
    query = apply_rotary_reference(query, cos, sin)
    if cache is None:
        return query
    if key_norm is not None:
        key = rms_norm_reference(key, key_norm, eps)
    if norms_values:
        value = rms_norm_reference(value, value.new_ones(value.shape[-1]), eps)
    key = apply_rotary_reference(key, cos, sin)
    store_kv_reference(key, value, cache, slot_mapping, uncoded_slots)
    return query
