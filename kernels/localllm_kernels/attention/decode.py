"""Attention of a few new tokens per request (one, or a draft window) over many keys.

The formula and the layout are those of `paged_attention.py`. The keys of a request are split among
programs (`attention/parts.py`). The grid depends on the number of requests alone, so that a
captured launch serves any lengths. A request's length determines how many programs have a part; the
others return at once, and nothing waits for them.
"""

from dataclasses import replace
from functools import partial
from typing import Any, Unpack

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from localllm_kernels.attention.cache_arguments import (
    CODES,
    KINDS,
    cache_kind,
    cache_pointers,
    turning_arguments,
)
from localllm_kernels.attention.example import Example
from localllm_kernels.attention.four_bits_kernels import OWN_KEYS
from localllm_kernels.attention.fragments import KEYS_EACH, _fragment_decode_kernel
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

MIN_DOT_ROWS = 16
MAX_SPLITS = 64
MIN_SPLIT_KEYS = 256
FRAGMENT_WARPS = 4
# Values with more numbers leave registers for few rows.
WIDE_VALUES = 256


@triton.jit(do_not_specialize=["num_splits", "max_blocks", "most_queries"])
def _decode_kernel(
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
    num_splits,
    most_queries,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MIN_TILES: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    UNROLL: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """OVERLAPS: whether the launch overlaps the one before, see `Workspace`."""
    GROUP: tl.constexpr = HEADS // KV_HEADS
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if OVERLAPS:
        gdc_wait()
        gdc_launch_dependents()
    first_query = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - first_query
    length = tl.load(lengths_ptr + seq).to(tl.int32)
    rows = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_D)
    token, head = rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = token < num_queries
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
    positions = length - num_queries + token

    first_tile = 0
    if HAS_WINDOW:
        first_tile = tl.maximum(length - num_queries - window + 1, 0) // BLOCK_N
    if OWN == 2:
        first_own = (length - num_queries) // OWN_KEYS * OWN_KEYS
        first_tile = tl.maximum(first_tile, first_own // BLOCK_N)
    num_tiles = tl.cdiv(length, BLOCK_N) - first_tile
    low, high, num_parts = tiles_of_part(num_tiles, num_splits, split, MIN_TILES)
    # Requests with more queries belong to another launch.
    if (split >= num_parts) | (num_queries > most_queries):
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
        (first_tile + low) * BLOCK_N,
        (first_tile + high) * BLOCK_N,
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
        task = seq * KV_HEADS + kv_head
        parts_ptr += task.to(tl.int64) * num_splits * (BLOCK_M * (BLOCK_D + 2))
        most, total, values, is_done = add_parts(
            most, total, values, parts_ptr, counters_ptr + task, split, num_parts,
            BLOCK_M, BLOCK_D, MAX_PARTS, UNROLL,
        )  # fmt: skip
        if not is_done:
            return
    end_rows(
        most, total, values, row, is_row, out_ptr, own_ptr, kv_head, factors_ptr, means_ptr,
        HEAD_DIM, VALUE_DIM, KIND, ROTATED, VALUES_ARE_KEYS, OWN, NUM_HIDDEN, BLOCK_D,
    )  # fmt: skip


def max_decode_rows(itemsize: int, value_dim: int, *, is_4_bit: bool) -> int:
    """The most rows of a request, queries times heads that share keys, that fit in registers."""
    if value_dim <= WIDE_VALUES:
        return 32 if itemsize == 4 else 64
    return 16 if itemsize == 4 or is_4_bit else 32


def _tile(
    block_m: int, block_d: int, itemsize: int, capability: int, *, is_4_bit: bool
) -> dict[str, int]:
    """Keys at a time, warps, and parts added up at a time: as many as fit into registers and shared
    memory (`python -m localllm_kernels.compiling.ahead_of_time`).
    """
    values = block_m * block_d
    if itemsize == 4:  # products on the plain cores, which keep much more in registers
        block_n, num_warps = (16, 8) if values >= 2048 else (32, 4)
    else:
        is_wide = capability in WIDE and (values <= 8192 or block_d <= 256)
        is_narrow = not is_wide and (values > 8192 or block_d > 256)
        block_n, num_warps = 32 if is_narrow else 64, 8 if values > 4096 else 4
        if is_4_bit and block_d > 256:  # codes and numbers, side by side
            block_n = 16
    return {
        "BLOCK_N": block_n,
        "MIN_TILES": MIN_SPLIT_KEYS // block_n,
        "UNROLL": max(1, min(4, 32 * 32 * num_warps // values)),
        "num_warps": num_warps,
    }


_CACHE_POINTERS = ("key_ptr", "value_ptr", "key_scales_ptr", "value_scales_ptr")


def paged_attention_decode(
    query: Tensor,
    cache: KVCache,
    workspace: Workspace,
    *,
    num_splits: int | None = None,
    out: Tensor | None = None,
    **how: Unpack[AttentionArguments],
) -> Tensor:
    """See paged_attention_reference. Rows after the last request are not written, nor those of
    requests with more than `max_query_len` queries; `out`: the tensor that the others are written
    to.

    `num_splits`: programs that may share the keys of a request and head; None: as many as fill the
    device. Each has at least MIN_SPLIT_KEYS.
    """
    launch = partial(_launch, query, workspace)
    return over_all_keys(launch, query, cache, workspace, num_splits, out, how)


def _launch(
    query: Tensor,
    workspace: Workspace,
    cache: KVCache,
    how: AttentionArguments,
    num_splits: int | None,
    out: Tensor,
    own: Tensor | None,
    which: int,
) -> None:
    """See over_all_keys."""
    _, heads, head_dim = query.shape
    _, kv_heads, cache_block, _ = cache.key.shape
    num_seqs, max_blocks = how["block_tables"].shape
    max_query_len, window = how["max_query_len"], how["window"]
    cap, sinks, value_dim = how.get("cap"), how.get("sinks"), out.shape[2]
    num_tasks = num_seqs * kv_heads
    if num_splits is None:
        num_keys = max_blocks * cache_block
        num_splits = min(wanted_splits(workspace, num_tasks, num_keys, MIN_SPLIT_KEYS), MAX_SPLITS)
    num_parts = num_tasks * num_splits if num_splits > 1 else 0
    rows = max_query_len * (heads // kv_heads)
    pointers = cache_pointers(cache)
    arguments: dict[str, Any] = {
        "query_ptr": query,
        **dict(zip(_CACHE_POINTERS, pointers, strict=True)),
        "tables_ptr": how["block_tables"],
        "starts_ptr": how["cu_seqlens_q"],
        "lengths_ptr": how["seq_lens"],
        "out_ptr": out,
        "own_ptr": present(own, out),
        "counters_ptr": workspace.counters(num_tasks),
        "scale": how["scale"] * LOG2_E,
        "window": window or 0,
        "max_blocks": max_blocks,
        "num_splits": num_splits,
        "most_queries": max_query_len,
        "HEADS": heads,
        "KV_HEADS": kv_heads,
        "HEAD_DIM": head_dim,
        "CACHE_BLOCK": cache_block,
        "KIND": cache_kind(cache),
        "OWN": which,
        "HAS_WINDOW": window is not None,
        "NUM_HIDDEN": how.get("num_hidden", 0),
        "MAX_PARTS": MAX_SPLITS,
    }
    turning = turning_arguments(cache)
    grid = (num_seqs, kv_heads, num_splits)
    is_plain = cap is None and sinks is None and value_dim == head_dim
    if workspace.key_fragments and is_plain and takes_fragments(query, cache, rows):
        arguments |= {name: turning[name] for name in ("factors_ptr", "means_ptr")}
        _launch_fragments(grid, arguments, workspace, rows, num_parts)
        return
    block_m = max(MIN_DOT_ROWS, triton.next_power_of_2(rows))
    widths = head_constants(head_dim, value_dim)
    _decode_kernel[grid](
        **arguments,
        **turning,
        **score_arguments(cap, sinks, pointers[0]),
        parts_ptr=workspace.parts(num_parts * block_m * (widths["BLOCK_D"] + 2)),
        BLOCK_M=block_m,
        **widths,
        OVERLAPS=workspace.overlaps,
        **workspace.launch_options,
        **_tile(
            block_m,
            widths["BLOCK_D"],
            query.itemsize,
            workspace.capability,
            is_4_bit=arguments["KIND"] == KINDS["int4"],
        ),
    )


def _launch_fragments(
    grid: tuple[int, int, int],
    arguments: dict[str, Any],
    workspace: Workspace,
    rows: int,
    num_parts: int,
) -> None:
    """Launch the kernel for the matrix units; `rows`: queries of a request and key/value head."""
    eights = triton.cdiv(rows, 8)
    part = 32 * eights * (arguments["HEAD_DIM"] // 4 + 4)
    words = {name: arguments[name].view(torch.int32) for name in ("key_ptr", "value_ptr")}
    if arguments["KIND"] != KINDS["int4"]:
        words["query_ptr"] = arguments["query_ptr"].view(torch.int64)
    _fragment_decode_kernel[grid](
        **arguments | words,
        parts_ptr=workspace.parts(num_parts * part),
        EIGHTS=eights,
        WARPS=FRAGMENT_WARPS,
        MIN_TURNS=MIN_SPLIT_KEYS // (FRAGMENT_WARPS * KEYS_EACH),
        PTX=not triton.knobs.runtime.interpret,
        num_warps=FRAGMENT_WARPS,
    )


def takes_fragments(query: Tensor, cache: KVCache, rows: int) -> bool:
    """Whether fragments.py has a kernel for this; `rows`: of a request and key/value head."""
    has_codes = cache_kind(cache) != KINDS["plain"]
    fits = cache.head_dim in (64, 128) and cache.key.shape[2] % 16 == 0 and rows <= 16
    return has_codes and fits and query.itemsize == 2 and query.is_contiguous()


def _spec(example: Example, rows: int, *, overlaps: bool = False) -> AotSpec:
    def call(workspace: Workspace) -> None:
        workspace.overlaps = overlaps
        example.attend(paged_attention_decode, workspace, rows)

    return AotSpec(
        _decode_kernel,
        f"{example.dtype}, {example.kind} cache, {rows} rows of {example.head_dim}{example.words}"
        + (", overlapping" if overlaps else ""),
        call,
        min_capability=90 if overlaps else 80,
        max_stack=_max_stack(example, rows),
        work=example.work,
    )


def _max_stack(example: Example, rows: int) -> int:
    """The largest tiles spill a few registers on some GPUs, and one more with Triton 3.6."""
    if rows == 64 or example.dtype == "fp32":
        return 32
    return 8 * (example.kind != "plain") + 16 * example.has_sinks + 32 * (example.kind == "int4")


def _own_spec(example: Example, rows: int) -> AotSpec:
    return AotSpec(
        _decode_kernel,
        f"own keys, {rows} rows of {example.head_dim}",
        lambda workspace: example.attend(paged_attention_decode, workspace, rows),
        at=0,
        work=replace(example, kind="plain").work,
    )


def _fragment_spec(example: Example, rows: int) -> AotSpec:
    def call(workspace: Workspace) -> None:
        workspace.key_fragments = True
        example.attend(paged_attention_decode, workspace, rows)

    turn = FRAGMENT_WARPS * KEYS_EACH
    return AotSpec(
        _fragment_decode_kernel,
        f"{example.kind} cache, {rows} rows of {example.head_dim}{example.words}",
        call,
        max_stack=16 * (1 + (example.kind == "int4")),  # values from before the loop
        work=replace(example.work, count=turn / 64, times=()),
    )


AOT_SPECS = [
    *(_fragment_spec(Example(kind), 8) for kind in CODES),
    *(_fragment_spec(Example(kind), 16) for kind in ("int8", "int4")),
    _fragment_spec(Example("int4", head_dim=64), 8),
    _fragment_spec(Example("int8", head_dim=64, has_window=True), 8),
    *(_spec(Example(kind), 16) for kind in KINDS),
    _spec(Example(), 16, overlaps=True),
    _spec(Example(has_window=True), 32),
    _spec(Example(), 64),
    _spec(Example(head_dim=256), 16),
    _spec(Example(head_dim=256), 64),
    _spec(Example(head_dim=512), 16),
    _spec(Example(head_dim=512, has_window=True), 32),
    *(
        _spec(Example(kind, head_dim=576, value_dim=512), rows)
        for rows in (16, 32)
        for kind in KINDS
        if rows == 16 or kind != "int4"
    ),
    _spec(Example("int4", head_dim=256, has_window=True), 16),
    _own_spec(Example("int4"), 16),
    _own_spec(Example("int4", head_dim=576, value_dim=512), 16),
    _spec(Example(head_dim=256, has_cap=True), 16),
    _spec(Example(head_dim=64, has_sinks=True), 16),
    *(
        _spec(Example(dtype="fp32", head_dim=dim, has_window=rows == 32), rows)
        for rows in (16, 32)
        for dim in (64, 128, 256)
    ),
    _spec(Example(dtype="fp32", head_dim=512), 16),
    _spec(Example(dtype="fp32", head_dim=576, value_dim=512), 16),
]
