"""Write new keys and values to their slots of the paged cache.

Slot s is row `s % block_size` of block `s // block_size`; block 0 is the null block, which is
never written.
"""

import torch
from torch import Tensor


def store_kv_reference(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    """Store the first `len(slot_mapping)` rows; rows behind them are padding.

    `key`, `value`: [num_tokens, num_kv_heads, head_dim]; caches: [num_blocks, num_kv_heads,
    block_size, head_dim], changed in place, of a dtype that rows are rounded to; `slot_mapping`:
    int64.
    """
    num_tokens, (_, kv_heads, block_size, head_dim) = slot_mapping.shape[0], key_cache.shape
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    heads = torch.arange(kv_heads, device=slot_mapping.device)
    rows = ((blocks[:, None] * kv_heads + heads) * block_size + offsets[:, None]).flatten()
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.view(-1, head_dim).index_copy_(
            0, rows, new[:num_tokens].reshape(-1, head_dim).to(cache.dtype)
        )
