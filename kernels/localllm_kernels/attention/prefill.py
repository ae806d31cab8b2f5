"""Attention of many new tokens per request, causal over a cached prefix and the new tokens.

The formula and the layout are those of `paged_attention.py`. A program takes a tile of queries of
one request, for the heads that share a key/value head, over all the keys that they see. It finds
its request by binary search: the tiles of request i are numbered from starts[i] // BLOCK_Q + i on,
so that none is missing; a tile after the last query has nothing to do. (vLLM's unified kernel
numbers its tiles in this way; pull request 16828.)
"""

from dataclasses import replace
from functools import partial
from typing import Unpack

import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.attention.cache_arguments import (
    KINDS,
    cache_kind,
    cache_pointers,
    turning_arguments,
)
from localllm_kernels.attention.example import Example
from localllm_kernels.attention.four_bits_kernels import OWN_KEYS
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.own_keys import over_all_keys
from localllm_kernels.attention.paged_attention import AttentionArguments
from localllm_kernels.attention.parts import add_parts, tiles_of_part, wanted_splits
from localllm_kernels.attention.tiles import (
    LOG2_E,
    WIDE,
    attend_tiles,
    end_rows,
    head_constants,
    score_arguments,
)
from localllm_kernels.compiling.aot import AotSpec
from localllm_kernels.compiling.launch import Workspace, present

NUM_WARPS = 8
MIN_SPLIT_KEYS = 512


@triton.jit
def _request_of(starts_ptr, tile, num_seqs, BLOCK_Q: tl.constexpr):
    """The last request whose first tile is not after `tile`."""
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        first_tile = tl.load(starts_ptr + middle) // BLOCK_Q + middle
        if first_tile <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit(do_not_specialize=["num_seqs", "max_blocks", "num_splits", "least_queries"])
def _prefill_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    sinks_ptr,
    own_ptr,
    factors_ptr,
    means_ptr,
    scale,
    window,
    cap,
    max_blocks,
    num_seqs,
    num_splits,
    least_queries,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    REST: tl.constexpr,
    VALUES_ARE_KEYS: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    ROTATED: tl.constexpr,
    OWN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_HIDDEN: tl.constexpr,
    HAS_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
):
    GROUP: tl.constexpr = HEADS // KV_HEADS
    tile, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = _request_of(starts_ptr, tile, num_seqs, BLOCK_Q)
    first_query = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - first_query
    skipped = (tile - (first_query // BLOCK_Q + seq)) * BLOCK_Q
    # Requests with fewer queries belong to another launch.
    if (skipped >= num_queries) | (num_queries < least_queries):
        return
    length = tl.load(lengths_ptr + seq).to(tl.int32)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    token, head = skipped + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (rows < BLOCK_Q * GROUP) & (token < num_queries)
    is_inside = is_row[:, None] & (columns < VALUE_DIM)[None, :]
    row = (first_query + token).to(tl.int64) * HEADS + head
    at = row[:, None] * HEAD_DIM + columns[None, :]
    query = tl.load(query_ptr + at, mask=is_inside, other=0.0)
    rest = query
    if REST:
        others = VALUE_DIM + tl.arange(0, REST)
        is_other = is_row[:, None] & (others < HEAD_DIM)[None, :]
        at = row[:, None] * HEAD_DIM + others[None, :]
        rest = tl.load(query_ptr + at, mask=is_other, other=0.0)
    first_position = length - num_queries
    positions = first_position + token
    first_key = 0
    if HAS_WINDOW:
        oldest = tl.maximum(first_position + skipped - window + 1, 0)
        first_key = oldest // BLOCK_N * BLOCK_N
    if OWN == 2:
        first_key = tl.maximum(first_key, (first_position + skipped) // OWN_KEYS * OWN_KEYS)
    end_key = tl.minimum(first_position + skipped + BLOCK_Q, length)
    num_tiles = tl.cdiv(end_key - first_key, BLOCK_N)
    low, high, num_parts = 0, num_tiles, 1
    if MAX_PARTS > 1:
        low, high, num_parts = tiles_of_part(num_tiles, num_splits, split, MIN_TILES)
        if split >= num_parts:
            return
    sinks = 0.0
    if HAS_SINKS:
        sinks = tl.load(sinks_ptr + head) * 1.4426950408889634  # log2(e)
        sinks = tl.where(split == 0, sinks, float("-inf"))
    most, total, values = attend_tiles(
        query,
        rest,
        positions,
        key_ptr,
        value_ptr,
        key_scales_ptr,
        value_scales_ptr,
        tables_ptr + seq.to(tl.int64) * max_blocks,
        kv_head,
        first_key + low * BLOCK_N,
        tl.minimum(first_key + high * BLOCK_N, end_key),
        length,
        scale,
        window,
        cap,
        sinks,
        factors_ptr,
        means_ptr,
        KV_HEADS,
        HEAD_DIM,
        VALUE_DIM,
        REST,
        VALUES_ARE_KEYS,
        CACHE_BLOCK,
        KIND,
        ROTATED,
        OWN,
        HAS_WINDOW,
        NUM_HIDDEN,
        HAS_CAP,
        HAS_SINKS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
    )
    if num_parts > 1:
        task = tile * KV_HEADS + kv_head
        parts_ptr += task.to(tl.int64) * num_splits * (BLOCK_M * (BLOCK_D + 2))
        most, total, values, is_done = add_parts(
            most, total, values, parts_ptr, counters_ptr + task, split, num_parts,
            BLOCK_M, BLOCK_D, MAX_PARTS, 1,
        )  # fmt: skip
        if not is_done:
            return
    end_rows(
        most, total, values, row, is_row, out_ptr, own_ptr, kv_head, factors_ptr, means_ptr,
        HEAD_DIM, VALUE_DIM, KIND, ROTATED, VALUES_ARE_KEYS, OWN, NUM_HIDDEN, BLOCK_D,
    )  # fmt: skip


def _tile(block_d: int, itemsize: int, capability: int, *, is_4_bit: bool) -> tuple[int, int]:
    """Rows, and keys at a time, that fit into registers and shared memory."""
    is_wide, row_bytes = capability in WIDE, block_d * itemsize
    if itemsize == 4:  # products on the plain cores, which keep much more in registers
        return (16 if row_bytes > 1024 else 32, 16) if row_bytes > 512 else (64, 32)
    if is_4_bit and row_bytes > 256:  # codes lie beside the numbers that they become
        row_bytes *= 2
    if row_bytes > 1024:
        return 16, 16
    if row_bytes > 512:
        return 32, 32
    if row_bytes > 256:
        return 64, 64 if is_wide else 32
    return 128 if is_wide else 64, 64


def _max_splits(itemsize: int) -> int:
    """The most programs that share keys: one for float32, which already fills the registers."""
    return 1 if itemsize == 4 else 32


def paged_attention_prefill(
    query: Tensor,
    cache: KVCache,
    workspace: Workspace,
    *,
    num_splits: int | None = None,
    least_queries: int = 0,
    out: Tensor | None = None,
    **how: Unpack[AttentionArguments],
) -> Tensor:
    """See paged_attention_reference. Rows after the last request are not written, nor those of
    requests with fewer than `least_queries`; `out`: the tensor that the others are written to.

    `num_splits`: programs that may share the keys of a tile of queries, except in float32; None: as
    many as fill the device. Each has at least MIN_SPLIT_KEYS.
    """
    launch = partial(_launch, query, workspace, least_queries)
    return over_all_keys(launch, query, cache, workspace, num_splits, out, how)


def _launch(
    query: Tensor,
    workspace: Workspace,
    least_queries: int,
    cache: KVCache,
    how: AttentionArguments,
    num_splits: int | None,
    out: Tensor,
    own: Tensor | None,
    which: int,
) -> None:
    """See over_all_keys."""
    num_tokens, heads, head_dim = query.shape
    _, kv_heads, cache_block, _ = cache.key.shape
    num_seqs, max_blocks = how["block_tables"].shape
    window, value_dim = how["window"], out.shape[2]
    group = heads // kv_heads
    widths = head_constants(head_dim, value_dim)
    kind = cache_kind(cache)
    block_m, block_n = _tile(
        widths["BLOCK_D"], query.itemsize, workspace.capability, is_4_bit=kind == KINDS["int4"]
    )
    block_m = max(block_m, triton.next_power_of_2(group))
    block_q = block_m // group
    num_tiles = num_tokens // block_q + num_seqs
    max_splits = _max_splits(query.itemsize)
    if num_splits is None:
        # Tiles of requests that belong to other launches do not count: they return at once.
        prompts = min(num_seqs, num_tokens // max(1, least_queries))
        wanted = (num_tokens // block_q + prompts) * kv_heads
        num_splits = wanted_splits(workspace, wanted, max_blocks * cache_block, MIN_SPLIT_KEYS)
    num_splits = min(num_splits, max_splits)
    num_parts = num_tiles * kv_heads * num_splits if num_splits > 1 else 0
    pointers = cache_pointers(cache)
    _prefill_kernel[(num_tiles, kv_heads, num_splits)](
        query,
        *pointers,
        how["block_tables"],
        how["cu_seqlens_q"],
        how["seq_lens"],
        out,
        workspace.parts(num_parts * block_m * (widths["BLOCK_D"] + 2)),
        workspace.counters(num_tiles * kv_heads),
        scale=how["scale"] * LOG2_E,
        window=window or 0,
        max_blocks=max_blocks,
        num_seqs=num_seqs,
        num_splits=num_splits,
        least_queries=least_queries,
        own_ptr=present(own, out),
        **score_arguments(how.get("cap"), how.get("sinks"), pointers[0]),
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        CACHE_BLOCK=cache_block,
        KIND=kind,
        OWN=which,
        HAS_WINDOW=window is not None,
        NUM_HIDDEN=how.get("num_hidden", 0),
        BLOCK_Q=block_q,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        **widths,
        **turning_arguments(cache),
        MIN_TILES=MIN_SPLIT_KEYS // block_n,
        MAX_PARTS=max_splits,
        num_warps=NUM_WARPS,
    )


def _spec(example: Example) -> AotSpec:
    return AotSpec(
        _prefill_kernel,
        f"{example.dtype}, {example.kind} cache, heads of {example.head_dim}{example.words}",
        lambda workspace: example.attend(paged_attention_prefill, workspace, 512),
        # Rows of float32 spill a few registers on some GPUs, and more with Triton 3.6; so do the
        # offsets of keys in 4 bits.
        max_stack=24 if example.dtype == "fp32" else 112 * (example.kind == "int4"),
        work=example.work,
    )


def _own_spec(example: Example) -> AotSpec:
    return AotSpec(
        _prefill_kernel,
        f"own keys, heads of {example.head_dim}",
        lambda workspace: example.attend(paged_attention_prefill, workspace, 512),
        at=0,
        work=replace(example, kind="plain").work,
    )


AOT_SPECS = [
    *(_spec(Example(kind)) for kind in KINDS),
    _spec(Example(has_window=True)),
    *(_spec(Example(head_dim=dim)) for dim in (256, 512)),
    *(_spec(Example(kind, head_dim=576, value_dim=512)) for kind in KINDS),
    _spec(Example("int4", head_dim=256)),
    _own_spec(Example("int4")),
    _own_spec(Example("int4", head_dim=576, value_dim=512)),
    _spec(Example(head_dim=256, has_cap=True)),
    _spec(Example(head_dim=64, has_sinks=True)),
    _spec(Example(dtype="fp32", head_dim=576, value_dim=512)),
    *(_spec(Example(dtype="fp32", head_dim=dim)) for dim in (64, 128, 256, 512)),
]
