"""Causal attention of ragged queries over a paged KV cache, with an optional sliding window.

    out = softmax(scale · q kᵀ, over keys j with  p − window < j ≤ p) · v      (p: query position)

With a `cap`, scores are kept within it, see capped.py (Gemma 2). A sink is a score of a head's own
that takes its share of the weights and has no value (gpt-oss). The first `num_hidden` keys are
hidden from all queries, whose output is zero if they see none.

Built so that a query's result has the same bits whatever else is in the batch and however the
prompt was split: keys are taken in tiles of `KEY_TILE` at absolute positions, each tile is summed
on its own, and the tiles are added from left to right. A tile that is masked for a query adds an
exact zero. Matrix products get a multiple of 8 rows, below which float32 products of the CPU
libraries change bits with the row count (`tests/kernels` checks this on the machine at hand).

Queries of the heads that share a key/value head are rows of one product (grouped-query attention
reads each key once). Sources: Kwon et al. 2023 (paged KV); Dao et al. 2022, section 3.1
(tiled softmax; here the maximum is taken over all tiles first, which needs no rescaling).
"""

from collections.abc import Callable
from itertools import pairwise
from typing import NotRequired, TypedDict, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm_kernels.attention.capped import capped
from localllm_kernels.attention.four_bits import OWN_KEYS
from localllm_kernels.attention.kv_cache import KVCache, plain_rows

KEY_TILE = 64
ROW_MULTIPLE = 8
# Queries of one prompt per tile; bounds the score matrix.
QUERY_TILE = 64
# Values of keys that are gathered at once; in float32 they stay in the processor's caches.
MAX_GATHERED_VALUES = 1 << 20


class AttentionArguments(TypedDict):
    """What an attention is given beside queries and cache; see the top of the file.

    `block_tables`: integer [num_seqs, max_blocks], padded with 0 (the null block); `cu_seqlens_q`:
    [num_seqs + 1], where each request's queries start; `seq_lens`: [num_seqs], keys of each request
    including its new tokens; `max_query_len`: the most new tokens of a request, by which some
    kernels choose their tiles; `sinks`: [num_heads]; `value_dim`: how many of a value's numbers are
    wanted, the first ones; None: all; `uncoded_tables`: block tables of `cache.uncoded`.
    """

    block_tables: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    max_query_len: int
    scale: float
    window: int | None
    cap: NotRequired[float | None]
    sinks: NotRequired[Tensor | None]
    num_hidden: NotRequired[int]
    value_dim: NotRequired[int | None]
    uncoded_tables: NotRequired[Tensor | None]


def paged_attention_reference(
    query: Tensor, cache: KVCache, **how: Unpack[AttentionArguments]
) -> Tensor:
    """Attend for every request of a batch: [num_tokens, num_heads, value_dim].

    `query`: [num_tokens, num_heads, head_dim], one request after another; rows after the last
    request are padding, and zero in the result.
    """
    block_tables, seq_lens = how["block_tables"], how["seq_lens"]
    uncoded_tables = how.get("uncoded_tables")
    out = query.new_zeros(*query.shape[:2], how.get("value_dim") or query.shape[2])
    starts, lengths = how["cu_seqlens_q"].tolist(), seq_lens.tolist()
    spans = list(pairwise(starts))
    # Requests with one new token go together, as many as the keys, padded to the longest, allow.
    singles = [i for i, (start, end) in enumerate(spans) if end - start == 1]
    longest = max((lengths[i] for i in singles), default=1)
    gathered_keys = -(-longest // KEY_TILE) * KEY_TILE
    gathered_values = gathered_keys * cache.key.shape[1] * cache.head_dim
    group = max(1, MAX_GATHERED_VALUES // gathered_values)
    for first in range(0, len(singles), group):
        single = singles[first : first + group]
        rows = torch.tensor([spans[i][0] for i in single], device=query.device)
        positions = (seq_lens[single] - 1).unsqueeze(1)
        attended = _attend(
            query[rows].unsqueeze(1),
            cache,
            how,
            block_tables=block_tables[single],
            uncoded_tables=None if uncoded_tables is None else uncoded_tables[single],
            positions=positions,
            max_position=max(lengths[i] for i in single) - 1,
            min_position=min(lengths[i] for i in single) - 1,
        )
        out[rows] = attended.squeeze(1)
    for i, (start, end) in enumerate(spans):
        if end - start == 1:
            continue
        first_position = lengths[i] - (end - start)
        for offset in range(0, end - start, QUERY_TILE):
            count = min(QUERY_TILE, end - start - offset)
            tile = slice(start + offset, start + offset + count)
            low = first_position + offset
            positions = torch.arange(low, low + count, device=query.device).unsqueeze(0)
            out[tile] = _attend(
                query[tile].unsqueeze(0),
                cache,
                how,
                block_tables=block_tables[i : i + 1],
                uncoded_tables=None if uncoded_tables is None else uncoded_tables[i : i + 1],
                positions=positions,
                max_position=low + count - 1,
                min_position=low,
            ).squeeze(0)
    return out


def _attend(
    query: Tensor,
    cache: KVCache,
    how: AttentionArguments,
    *,
    block_tables: Tensor,
    uncoded_tables: Tensor | None,
    positions: Tensor,
    max_position: int,
    min_position: int,
) -> Tensor:
    """`query`: [seqs, queries, heads, head_dim] at `positions` [seqs, queries], all within
    `min_position..max_position`; returns [seqs, queries, heads, value_dim].
    """
    seqs, queries, heads, head_dim = query.shape
    window, cap, sinks = how["window"], how.get("cap"), how.get("sinks")
    num_hidden, value_dim = how.get("num_hidden", 0), how.get("value_dim") or head_dim
    kv_heads = cache.key.shape[1]
    groups = heads // kv_heads
    first_key = 0 if window is None else max(0, min_position - window + 1)
    first_key -= first_key % KEY_TILE
    num_tiles = (max_position - first_key) // KEY_TILE + 1
    span = positions[:, -1:], first_key, num_tiles * KEY_TILE
    shape = seqs, kv_heads, num_tiles, KEY_TILE, head_dim
    key, value = (x.view(shape) for x in _gather(cache, block_tables, *span))

    # Rows of one product: the queries of one key/value head, [seqs, kv_heads, 1, rows, head_dim].
    rows = queries * groups
    packed = (query.float() * how["scale"]).view(seqs, queries, kv_heads, groups, head_dim)
    packed = packed.transpose(1, 2).reshape(seqs, kv_heads, 1, rows, head_dim)
    row_positions = positions.repeat_interleave(groups, dim=1)
    padding = -rows % ROW_MULTIPLE
    if padding:
        packed = F.pad(packed, (0, 0, 0, padding))
        last = row_positions[:, -1:].expand(seqs, padding)
        row_positions = torch.cat((row_positions, last), dim=1)

    row_positions = row_positions.view(seqs, 1, 1, -1, 1)
    keys = torch.arange(first_key, first_key + num_tiles * KEY_TILE, device=query.device)
    keys = keys.view(1, 1, num_tiles, 1, KEY_TILE)
    scores = torch.matmul(packed, key.transpose(-1, -2))
    if cache.uncoded is not None and uncoded_tables is not None:
        is_uncoded = keys // OWN_KEYS == row_positions // OWN_KEYS
        key, uncoded_value = (x.view(shape) for x in _gather(cache.uncoded, uncoded_tables, *span))
        scores = torch.where(is_uncoded, torch.matmul(packed, key.transpose(-1, -2)), scores)
    if cap is not None:
        scores = capped(scores, cap)
    hidden = (keys > row_positions) | (keys < num_hidden)
    if window is not None:
        hidden = hidden | (keys <= row_positions - window)
    scores = scores.masked_fill_(hidden, -torch.inf)
    maximum = scores.amax(dim=(2, 4), keepdim=True)
    if num_hidden:
        # From a query that sees nothing, nothing is subtracted.
        maximum = maximum.masked_fill(maximum == -torch.inf, 0.0)
    if sinks is not None:
        # A row is a query of a head, the heads of a key/value head side by side.
        sink = sinks.float().view(1, kv_heads, 1, groups).repeat(1, 1, queries, 1)
        sink = F.pad(sink.flatten(2), (0, padding)).view(1, kv_heads, 1, -1, 1)
        maximum = torch.maximum(maximum, sink)
    weights = scores.sub_(maximum).exp_()
    tile_sums = weights.sum(dim=-1, keepdim=True)
    if cache.uncoded is not None and uncoded_tables is not None:
        tile_outputs = torch.matmul(weights * is_uncoded, uncoded_value[..., :value_dim])
        tile_outputs += torch.matmul(weights * ~is_uncoded, value[..., :value_dim])
    else:
        tile_outputs = torch.matmul(weights, value[..., :value_dim])
    total, denominator = tile_outputs[:, :, 0], tile_sums[:, :, 0]
    if sinks is not None:
        denominator = denominator + (sink - maximum).exp()[:, :, 0]
    for tile in range(1, num_tiles):
        total = total + tile_outputs[:, :, tile]
        denominator = denominator + tile_sums[:, :, tile]
    if num_hidden:
        denominator = denominator.masked_fill(denominator == 0, 1.0)
    attended = (total / denominator)[:, :, :rows]
    attended = attended.view(seqs, kv_heads, queries, groups, value_dim).transpose(1, 2)
    return attended.reshape(seqs, queries, heads, value_dim).to(query.dtype)


def in_parts_of_heads(
    attend: Callable[..., Tensor],
    most: int,
    query: Tensor,
    cache: KVCache,
    **how: Unpack[AttentionArguments],
) -> Tensor:
    """What `attend` gives, which takes no more than `most` heads that share keys."""
    kv_heads, sinks = cache.key.shape[1], how.get("sinks")
    groups = query.shape[1] // kv_heads
    if groups <= most:
        return attend(query, cache, **how)
    by_key, outputs = query.view(len(query), kv_heads, groups, -1), []
    for first in range(0, groups, most):
        part = by_key[:, :, first : first + most]
        if sinks is not None:
            how["sinks"] = sinks.view(kv_heads, groups)[:, first : first + most].flatten()
        found = attend(part.flatten(1, 2).contiguous(), cache, **how)
        outputs.append(found.view(*part.shape[:3], -1))
    return torch.cat(outputs, dim=2).flatten(1, 2)


def _gather(
    cache: KVCache,
    block_tables: Tensor,
    last_positions: Tensor,
    first_key: int,
    num_keys: int,
) -> tuple[Tensor, Tensor]:
    """Keys and values from position `first_key` on, new float32 tensors [seqs, kv_heads, num_keys,
    head_dim]. Values after `last_positions` [seqs, 1] are not written yet, and are set to zero:
    their weight is exactly zero, but zero times a stale infinity would be NaN.
    """
    seqs, device = len(block_tables), block_tables.device
    _, kv_heads, block_size, _ = cache.key.shape
    first_block, skipped = divmod(first_key, block_size)
    num_blocks = -(-(skipped + num_keys) // block_size)
    tables = block_tables[:, first_block : first_block + num_blocks]
    if tables.shape[1] < num_blocks:
        tables = F.pad(tables, (0, num_blocks - tables.shape[1]))
    last_blocks = last_positions // block_size - first_block
    tables = tables.masked_fill(torch.arange(num_blocks, device=device) > last_blocks, 0)
    heads = torch.arange(kv_heads, device=device)
    rows = tables.unsqueeze(1) * kv_heads + heads.view(-1, 1)
    shape = seqs, kv_heads, num_blocks, block_size, cache.head_dim
    key, value = (
        _rows_of_blocks(cache, rows, are_keys=are_keys).view(shape) for are_keys in (True, False)
    )
    offsets = torch.arange(block_size, device=device)
    is_unwritten = offsets > last_positions % block_size  # [seqs, block_size]
    partial = (torch.arange(seqs, device=device), slice(None), last_blocks.flatten())
    value[partial] = value[partial].masked_fill(is_unwritten.view(seqs, 1, block_size, 1), 0.0)
    part = slice(skipped, skipped + num_keys)
    return key.flatten(2, 3)[:, :, part].float(), value.flatten(2, 3)[:, :, part].float()


def _rows_of_blocks(cache: KVCache, rows: Tensor, *, are_keys: bool) -> Tensor:
    """Blocks of heads, [seqs, kv_heads, tokens, head_dim]; `rows`: [seqs, kv_heads, num_blocks],
    which count the heads of all blocks.
    """
    are_keys = are_keys or cache.values_are_keys
    codes, scales = cache.key, cache.key_scales
    if not are_keys:
        codes, scales = cache.value, cache.value_scales
    # As bytes, since most operators do not support float8.
    chosen = codes.view(torch.uint8).flatten(0, 1)[rows].view(codes.dtype).flatten(2, 3)
    if scales is None:
        return chosen
    of_rows = scales.flatten(0, 1)[rows].flatten(2, 3)
    return plain_rows(chosen, of_rows, cache.coding, are_keys=are_keys)
