"""What stands between the query-key-value product and attention, as one operator.

Queries and keys are normed head by head where the model does so (Qwen3), turned by their positions,
and the new keys and values are written to their slots of the paged cache.
"""

from torch import Tensor

from localllm_kernels.kv_cache import KVCache
from localllm_kernels.rms_norm import rms_norm_reference
from localllm_kernels.rotary import apply_rotary_reference
from localllm_kernels.store_kv import store_kv_reference


def rotate_and_store_reference(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cache: KVCache,
    slot_mapping: Tensor,
    *,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    eps: float,
) -> Tensor:
    """The queries, [num_tokens, num_heads, head_dim].

    `qkv`: [num_tokens, num_heads + 2 · num_kv_heads, head_dim]; `cos`, `sin`: float32
    [num_tokens, head_dim / 2]; `cache` is changed in place; norms: [head_dim] each, both or
    neither. Rows behind `slot_mapping` are padding.
    """
    kv_heads = cache.key.shape[1]
    heads = qkv.shape[1] - 2 * kv_heads
    query, key, value = qkv[:, :heads], qkv[:, heads:-kv_heads], qkv[:, -kv_heads:]
    if query_norm is not None and key_norm is not None:
        query = rms_norm_reference(query, query_norm, eps)
        key = rms_norm_reference(key, key_norm, eps)
    query = apply_rotary_reference(query, cos, sin)
    key = apply_rotary_reference(key, cos, sin)
    store_kv_reference(key, value, cache, slot_mapping)
    return query
