"""Write new keys and values to their slots of the paged cache.

Slot s is row `s % block_size` of block `s // block_size`; a row whose slot is -1 is not written.
"""

import torch
from torch import Tensor

from localllm_kernels.attention.kv_cache import KVCache, coded_rows


def store_kv_reference(
    key: Tensor,
    value: Tensor,
    cache: KVCache,
    slot_mapping: Tensor,
    uncoded_slots: Tensor | None = None,
) -> None:
    """Store the first `len(slot_mapping)` rows; any rows after them are padding.

    `key`, `value`: [num_tokens, num_kv_heads, head_dim]; `cache` is changed in place; rows are
    rounded to its dtype; `slot_mapping`: int64; `uncoded_slots`: those in `cache.uncoded`.
    """
    if cache.uncoded is not None and uncoded_slots is not None:
        store_kv_reference(key, value, cache.uncoded, uncoded_slots)
    num_tokens, (_, kv_heads, block_size, width) = slot_mapping.shape[0], cache.key.shape
    is_stored = slot_mapping >= 0
    slot_mapping = slot_mapping[is_stored]
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    heads = torch.arange(kv_heads, device=slot_mapping.device)
    rows = ((blocks[:, None] * kv_heads + heads) * block_size + offsets[:, None]).flatten()
    for stored, scales, new in (
        (cache.key, cache.key_scales, key),
        (cache.value, cache.value_scales, value),
    ):
        new_rows = new[:num_tokens][is_stored]
        if scales is None:
            plain = new_rows.reshape(-1, width)
            stored.view(-1, width).index_copy_(0, rows, plain.to(stored.dtype))
            continue
        if stored is cache.key and cache.key_means is not None:
            new_rows = new_rows.float() - cache.key_means
        codes, new_scales = coded_rows(
            new_rows, stored.dtype, cache.coding, are_keys=stored is cache.key
        )
        # As bytes, since most operators do not support float8.
        codes = codes.reshape(-1, width).view(torch.uint8)
        stored.view(torch.uint8).view(-1, width).index_copy_(0, rows, codes)
        scales.view(-1).index_copy_(0, rows, new_scales.flatten())
