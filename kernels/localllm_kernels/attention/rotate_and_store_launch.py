"""The operations before attention on a GPU, see `rotate_and_store.py`: a program takes one head of
one token.
"""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.attention.cache_arguments import CODES, KINDS, cache_kind, cache_pointers
from localllm_kernels.attention.example import example_cache
from localllm_kernels.attention.four_bits import rotation_size
from localllm_kernels.attention.four_bits_kernels import NUM_MEANS, store_key, store_value
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.compiling.aot import AotSpec, Work
from localllm_kernels.compiling.launch import Workspace, present
from localllm_kernels.primitives.e4m3 import to_e4m3


@triton.jit
def _store_row(
    values, cache_ptr, scales_ptr, row, columns, inside, HEAD_DIM: tl.constexpr, KIND: tl.constexpr
):
    """Store a key or value, float32 [BLOCK], in row `row` of its cache."""
    at = cache_ptr + row * HEAD_DIM + columns
    if KIND == 0:
        tl.store(at, values.to(cache_ptr.dtype.element_ty), mask=inside)
    else:
        limit = 127.0 if KIND == 1 else 448.0
        largest = tl.max(tl.abs(values), axis=0)
        factor = tl.where(largest > 0.0, limit / largest, 0.0)
        codes = tl.minimum(tl.maximum(values * factor, -limit), limit)
        # Values that are not finite make the scale NaN (or infinite), and so all that is read.
        tl.store(scales_ptr + row, largest / limit + tl.sum(values - values, axis=0))
        if KIND == 1:
            # Adding this number rounds to a whole number, half to even.
            whole = (codes + 12582912.0) - 12582912.0
            tl.store(at, whole.to(tl.int8), mask=inside)
        else:
            tl.store(at, to_e4m3(codes), mask=inside)


@triton.jit
def _row_of(slot, kv_head, KV_HEADS: tl.constexpr, CACHE_BLOCK: tl.constexpr):
    block = slot // CACHE_BLOCK * KV_HEADS + kv_head
    return block * CACHE_BLOCK + slot % CACHE_BLOCK


@triton.jit(do_not_specialize=["num_stored"])
def _rotate_and_store_kernel(
    qkv_ptr,
    cos_ptr,
    sin_ptr,
    query_norm_ptr,
    key_norm_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    key_means_ptr,
    key_factors_ptr,
    key_feedback_ptr,
    uncoded_key_ptr,
    uncoded_value_ptr,
    uncoded_slots_ptr,
    slots_ptr,
    num_stored,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_VALUES: tl.constexpr,
    NORMS_VALUES: tl.constexpr,
    HAS_MEANS: tl.constexpr,
    HAS_UNCODED: tl.constexpr,
    KIND: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = qkv_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < HEAD_DIM
    is_query, is_value = head < HEADS, head >= HEADS + KV_HEADS
    if HAS_VALUES:
        start = qkv_ptr + (token * (HEADS + 2 * KV_HEADS) + head) * HEAD_DIM
    else:
        own = tl.where(is_value, head - KV_HEADS, head)
        start = qkv_ptr + (token * (HEADS + KV_HEADS) + own) * HEAD_DIM
    if not is_query and token >= num_stored:
        return
    kv_row, uncoded_row = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if not is_query:
        kv_head = tl.where(is_value, head - HEADS - KV_HEADS, head - HEADS)
        slot = tl.load(slots_ptr + token)
        if slot < 0:
            return
        kv_row = _row_of(slot, kv_head, KV_HEADS, CACHE_BLOCK)
        if HAS_UNCODED:
            uncoded_row = _row_of(
                tl.load(uncoded_slots_ptr + token), kv_head, KV_HEADS, CACHE_BLOCK
            )
    # Sums and products are in float32, and rounded where torch's operators round.
    x = tl.load(start + columns, mask=inside, other=0.0).to(tl.float32)
    if is_value:
        if NORMS_VALUES:
            x *= tl.rsqrt(tl.sum(x * x, axis=0) / HEAD_DIM + eps)
            x = x.to(dtype).to(tl.float32)
        if KIND == 3:
            store_value(x, value_ptr, value_scales_ptr, kv_row, columns, HEAD_DIM, ROTATED)
        else:
            _store_row(x, value_ptr, value_scales_ptr, kv_row, columns, inside, HEAD_DIM, KIND)
        if HAS_UNCODED:
            _store_row(x, uncoded_value_ptr, qkv_ptr, uncoded_row, columns, inside, HEAD_DIM, 0)
        return
    # The other of each pair: first + half, or second - half.
    is_first = columns < HALF
    others = tl.where(is_first, columns + HALF, columns - HALF)
    y = tl.load(start + others, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / HEAD_DIM + eps)
        norm_ptr = query_norm_ptr if is_query else key_norm_ptr
        weight = tl.load(norm_ptr + columns, mask=inside, other=0.0).to(tl.float32)
        weight_y = tl.load(norm_ptr + others, mask=inside, other=0.0).to(tl.float32)
        x, y = x * scale, y * scale
        if query_norm_ptr.dtype.element_ty != tl.float32:
            x, y = x.to(dtype).to(tl.float32), y.to(dtype).to(tl.float32)
        x, y = (weight * x).to(dtype).to(tl.float32), (weight_y * y).to(dtype).to(tl.float32)
    pair = tl.where(is_first, columns, columns - HALF)
    cos = tl.load(cos_ptr + token * HALF + pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + token * HALF + pair, mask=inside, other=0.0)
    turned = x * cos + y * tl.where(is_first, -sin, sin)
    if is_query:
        at = query_ptr + (token * HEADS + head) * HEAD_DIM + columns
        tl.store(at, turned.to(dtype), mask=inside)
    else:
        rounded, its = turned.to(dtype).to(tl.float32), (head - HEADS) * HEAD_DIM
        if KIND == 3:
            store_key(
                rounded, key_ptr, key_scales_ptr, kv_row, columns, key_factors_ptr + its,
                key_means_ptr + its * NUM_MEANS, key_feedback_ptr + its * HEAD_DIM,
                HEAD_DIM, ROTATED,
            )  # fmt: skip
        else:
            if HAS_MEANS:
                rounded -= tl.load(key_means_ptr + its + columns, mask=inside, other=0.0)
            _store_row(rounded, key_ptr, key_scales_ptr, kv_row, columns, inside, HEAD_DIM, KIND)
        if HAS_UNCODED:
            _store_row(rounded, uncoded_key_ptr, qkv_ptr, uncoded_row, columns, inside, HEAD_DIM, 0)


def rotate_and_store(
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
    """See rotate_and_store_reference."""
    qkv = qkv.contiguous()
    num_tokens, all_heads, head_dim = qkv.shape
    _, kv_heads, cache_block, _ = (0, 0, 1, 0) if cache is None else cache.key.shape
    heads = all_heads - (2 if has_values else 1) * kv_heads
    query = qkv.new_empty(num_tokens, heads, head_dim)
    pointers, coding, means, uncoded = 4 * (qkv,), None, None, None
    num_written = 2 * kv_heads
    if cache is not None:
        pointers, coding, means = cache_pointers(cache), cache.coding, cache.key_means
        uncoded = None if uncoded_slots is None else cache.uncoded
        if coding is not None:
            key, value, *scales = pointers
            pointers = key, value, scales[0].view(torch.int16), scales[1].view(torch.int16)
        if cache.values_are_keys:
            num_written = kv_heads
    _rotate_and_store_kernel[(num_tokens, heads + num_written)](
        qkv,
        cos,
        sin,
        present(query_norm, qkv),
        present(key_norm, qkv),
        query,
        *pointers,
        present(means if coding is None else coding.means, qkv),
        qkv if coding is None else coding.factors,
        qkv if coding is None else coding.feedback,
        qkv if uncoded is None else uncoded.key,
        qkv if uncoded is None else uncoded.value,
        present(uncoded_slots, slot_mapping),
        slot_mapping,
        slot_mapping.shape[0],
        eps,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HEAD_DIM=head_dim,
        CACHE_BLOCK=cache_block,
        HAS_NORM=query_norm is not None,
        HAS_VALUES=has_values,
        NORMS_VALUES=norms_values,
        HAS_MEANS=means is not None,
        HAS_UNCODED=uncoded is not None,
        KIND=KINDS["plain"] if cache is None else cache_kind(cache),
        ROTATED=rotation_size(head_dim),
        BLOCK=triton.next_power_of_2(head_dim),
        num_warps=1,
    )
    return query


@dataclass(frozen=True, slots=True)
class _Example:
    """Of an 8B model; without `heads`, the rows of latent attention."""

    kind: str = "plain"
    heads: int = 32
    head_dim: int = 128
    norm_type: torch.dtype = torch.bfloat16
    has_own_values: bool = True
    has_means: bool = False

    def __call__(self, workspace: Workspace) -> None:
        kv_heads, bf16 = 8 if self.heads else 1, torch.bfloat16
        stored = kv_heads * (2 if self.has_own_values else 1)
        shape = 2, kv_heads, 16, self.head_dim
        cache = example_cache(shape, CODES.get(self.kind, bf16))
        uncoded = None if cache.coding is None else example_cache(shape, bf16)
        means = torch.empty(kv_heads, self.head_dim) if self.has_means else None
        angles = torch.empty(1, self.head_dim // 2)
        norm = torch.empty(self.head_dim, dtype=self.norm_type) if self.heads else None
        rotate_and_store(
            torch.empty(1, self.heads + stored, self.head_dim, dtype=bf16),
            angles,
            angles,
            replace(cache, key_means=means, uncoded=uncoded),
            torch.zeros(1, dtype=torch.int64),
            query_norm=norm,
            key_norm=norm,
            eps=1e-6,
            has_values=self.has_own_values,
            norms_values=bool(self.heads) and not self.has_own_values,
            uncoded_slots=None if uncoded is None else torch.zeros(1, dtype=torch.int64),
        )


def _spec(example: _Example) -> AotSpec:
    words = "" if example.norm_type == torch.bfloat16 else ", norms in float32"
    words += ", keys less their means" if example.has_means else ""
    if example.heads:
        words += "" if example.has_own_values else ", keys as values"
    else:
        words = f", rows of {example.head_dim}"
    return AotSpec(
        _rotate_and_store_kernel,
        f"{example.kind} cache{words}",
        example,
        # In 4 bits, four numbers of a key, and the errors that they leave to the others.
        work=Work("number", 4, 0.5, is_shared=True)
        if example.kind == "int4"
        else Work("value", example.head_dim, 4),
    )


AOT_SPECS = [
    *(_spec(_Example(kind)) for kind in KINDS),
    *(_spec(_Example(kind, has_means=True)) for kind in ("int8", "fp8")),
    _spec(_Example(head_dim=256, norm_type=torch.float32)),
    _spec(_Example(head_dim=512, norm_type=torch.float32, has_own_values=False)),
    *(_spec(_Example(kind, heads=0, head_dim=576, has_own_values=False)) for kind in KINDS),
]
