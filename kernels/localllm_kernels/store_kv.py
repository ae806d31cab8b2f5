"""Write new keys and values to their slots of the paged cache.

Slot s is row `s % block_size` of block `s // block_size`; block 0 is the null block, which is
never written.
"""

from torch import Tensor


def store_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store the first `len(slot_mapping)` rows; rows behind them are padding.

    `key`, `value`: [num_tokens, num_kv_heads, head_dim]; caches: [num_blocks, block_size,
    num_kv_heads, head_dim], changed in place; `slot_mapping`: int64.
    """
    num_tokens = slot_mapping.shape[0]
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key[:num_tokens])
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value[:num_tokens])
