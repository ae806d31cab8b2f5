"""The rotation with its write to the cache, and attention over the cache. See `case.py`."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from localllm.model.blocks.attention import AttentionSpec
from localllm.model.paged_kv_cache import empty_cache
from localllm.operators.case import TOLERANCE, Cost, OperatorCase, Setting, distance, widened
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.attention.four_bits import FOUR_BITS, KeyCoding
from localllm_kernels.attention.kv_cache import CODE_LIMITS, KVCache, coded_rows, row_bytes
from localllm_kernels.compiling.choice import Piece

# The largest step between neighbouring codes, relative to the root mean square of a row; codes may
# differ by one if a quotient lies between two.
_CODE_STEPS = {torch.int8: 0.05, torch.float8_e4m3fn: 0.3, FOUR_BITS: 1.0}


def rotation(on: Setting, rows: int, spec: AttentionSpec) -> OperatorCase:
    """Rotation with the norms of heads, and the write to the cache."""
    sizes, dim, kv_heads = on.sizes, spec.head_dim, spec.num_kv_heads
    has_own, norms = spec.reads is None, spec.norms
    stored = kv_heads * (1 + spec.has_values) if has_own else 0
    qkv = on.values(rows, spec.num_heads + stored, dim)
    angles = 6 * torch.rand(rows, dim // 2, device=on.device)
    if spec.values_are_keys:
        # Key and value are in the same memory: they have to be equal.
        angles.zero_()
    cos, sin = angles.cos(), angles.sin()
    norm = None
    if norms is not None and spec.has_head_norms:
        norm = on.norm_weight(dim, is_wide=norms.spec("").is_wide)
    slots = sizes.block_size + torch.randperm(rows, device=on.device)
    shape = (-(-rows // sizes.block_size) + 1, kv_heads, sizes.block_size, dim)

    def cache(dtype: torch.dtype) -> KVCache | None:
        if not has_own:
            return None
        coding = _coding(on, spec) if dtype == FOUR_BITS else None
        return empty_cache(
            shape, dtype, on.device, values_are_keys=spec.values_are_keys, coding=coding
        )

    def call(ops: Ops, qkv: Tensor, norm: Tensor | None, cache: KVCache | None) -> Tensor:
        return ops.rotate_and_store(
            qkv,
            cos,
            sin,
            cache,
            slots,
            query_norm=norm,
            key_norm=norm,
            eps=1e-6 if norms is None else norms.eps,
            has_values=spec.has_values,
            norms_values=norms is not None and norms.has_value,
        )

    def written_of(part: Tensor) -> Tensor:
        """Those that were written."""
        return part.transpose(1, 2).flatten(0, 1)[slots]

    def away() -> float:
        kept, exact = cache(sizes.kv_dtype), cache(torch.float)
        query = call(on.own, qkv, norm, kept)
        right = call(TORCH_OPS, qkv.float(), None if norm is None else norm.float(), exact)
        furthest = distance(query, right, on.unit)
        if kept is None or exact is None:
            return furthest
        found = widened(kept)
        unit = on.unit
        if sizes.kv_dtype in _CODE_STEPS:
            unit = _CODE_STEPS[sizes.kv_dtype] / TOLERANCE
        pairs = ((found.key, exact.key), (found.value, exact.value))
        return max(furthest, *(distance(written_of(a), written_of(b), unit) for a, b in pairs))

    count = 0 if not has_own else 1 if spec.values_are_keys else 2
    written = count * rows * kv_heads * row_bytes(dim, sizes.kv_dtype)
    moved = (qkv.numel() + rows * spec.num_heads * dim) * qkv.itemsize + written
    found = on.case(
        Piece.ROTATION,
        "rotation" if has_own else "rotation of queries alone",
        call,
        (qkv, norm, cache(sizes.kv_dtype)),
        Cost(moved, 7 * qkv.numel()),
    )
    return replace(found, distance=away)


def attention(
    on: Setting, piece: Piece, requests: Sequence[tuple[int, int]], spec: AttentionSpec
) -> OperatorCase:
    """Attention of `requests`: their keys and new ones, in blocks that lie anywhere."""
    block, device, dim = on.sizes.block_size, on.device, spec.head_dim
    lengths, new = [keys for keys, _ in requests], [count for _, count in requests]
    longest, blocks = max(lengths), -(-max(lengths) // block)
    cache = _filled(on, (len(lengths) * blocks + 1, spec.num_kv_heads, block, dim), spec)
    order = torch.randperm(len(lengths) * blocks, device=device).add(1).int()
    starts = torch.tensor([0, *new], device=device).cumsum(0).int()
    tables = order.view(len(lengths), blocks)
    query = on.values(sum(new), spec.num_heads, dim)
    keys = torch.tensor(lengths, device=device)
    sinks = torch.randn(spec.num_heads, device=device) if spec.scores.has_sinks else None

    def call(ops: Ops, query: Tensor, cache: KVCache) -> Tensor:
        return ops.paged_attention(
            query,
            cache,
            block_tables=tables,
            uncoded_tables=None if cache.uncoded is None else tables,
            cu_seqlens_q=starts,
            seq_lens=keys,
            max_query_len=max(new),
            scale=spec.score_scale,
            window=spec.window,
            cap=spec.scores.cap,
            sinks=sinks,
            value_dim=spec.value_dim,
        )

    told = ", ".join(f"{count} of {length}" for length, count in requests)
    behind = "" if spec.window is None else f", window {spec.window}"
    reach = spec.window or longest
    read = sum(min(length, reach + count - 1) for length, count in requests)
    pairs = sum(
        min(seen, reach)
        for length, count in requests
        for seen in range(length - count + 1, length + 1)
    )
    row = row_bytes(dim, on.sizes.kv_dtype) * (1 if spec.values_are_keys else 2)
    cost = Cost(
        read * spec.num_kv_heads * row + 2 * query.nbytes,
        4 * spec.num_heads * dim * pairs,
        "fp32" if query.dtype == torch.float32 else "bf16",
    )
    return on.case(piece, f"{told} keys{behind}", call, (query, cache), cost)


def _filled(on: Setting, shape: tuple[int, ...], spec: AttentionSpec) -> KVCache:
    dtype, count = on.sizes.kv_dtype, 1 if spec.values_are_keys else 2
    drawn = [torch.randn(shape, device=on.device) for _ in range(count)]
    coding = _coding(on, spec) if dtype == FOUR_BITS else None
    if coding is None and dtype not in CODE_LIMITS:
        plain = [each.to(dtype) for each in drawn]
        return KVCache(plain[0], plain[-1])
    blocks, _, size, _ = shape
    parts = []
    for i, each in enumerate(drawn):
        by_token = each.transpose(1, 2).flatten(0, 1)
        for part in coded_rows(by_token, dtype, coding, are_keys=i == 0):
            parts.append(part.view(blocks, size, *part.shape[1:]).transpose(1, 2).contiguous())
    uncoded = None
    if coding is not None:
        plain = [each.to(on.sizes.dtype) for each in drawn]
        uncoded = KVCache(plain[0], plain[-1])
    return KVCache(parts[0], parts[-2], parts[1], parts[-1], coding=coding, uncoded=uncoded)


def _coding(on: Setting, spec: AttentionSpec) -> KeyCoding:
    """Of keys in 4 bits, with means and factors but without feedback, which only moves errors."""
    shape = (1, spec.num_kv_heads, spec.head_dim)
    plain = KeyCoding.plain(shape, on.device).layer(0)
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(plain.means.shape, generator=generator).to(on.device)
    factors = 0.8 + 0.4 * torch.rand(plain.factors.shape, generator=generator).to(on.device)
    if spec.values_are_keys:
        means = means[:, :1].expand_as(means).contiguous()
    return replace(plain, means=means, factors=factors)
