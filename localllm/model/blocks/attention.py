"""Grouped-query attention over the paged cache; query, key and value come from one product."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.model.blocks.block import (
    BlockInputs,
    InputRows,
    KVState,
    LinearGroup,
    Parts,
    RowBytes,
    Work,
)
from localllm.model.norm import RMSNorm
from localllm.model.rope_config import RopeConfig

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection
    from localllm.model.rope import RopeTable

# What the reference attention holds at once, see localllm_kernels/paged_attention.py: a tile of
# queries against the context (scores, weights, mask), and gathered keys and values in float32.
_QUERY_TILE = 64
_MAX_GATHERED_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The sizes of an attention. `has_head_norms`: a norm on each query and key head (Qwen3)."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    has_head_norms: bool = False
    eps: float = 0.0

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        """See BlockSpec."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv = (
            ("self_attn.q_proj", queries),
            ("self_attn.k_proj", keys),
            ("self_attn.v_proj", keys),
        )
        group = self.num_heads // self.num_kv_heads
        values = InputRows("self_attn.v_proj", self.num_kv_heads, group, self.head_dim)
        output = (("self_attn.o_proj", self.hidden_size),)
        return (
            LinearGroup("qkv", qkv, self.hidden_size, self.qkv_bias),
            LinearGroup("output", output, queries, self.o_bias, inputs=values),
        )

    @property
    def vectors(self) -> Mapping[str, int]:
        """See BlockSpec."""
        names = ("self_attn.q_norm", "self_attn.k_norm") if self.has_head_norms else ()
        return {f"{name}.weight": self.head_dim for name in names}

    @property
    def state(self) -> KVState:
        """See BlockSpec."""
        return KVState(self.num_kv_heads, self.head_dim, self.window)

    @property
    def workspace(self) -> int:
        """See BlockSpec."""
        return 3 * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def gathered_bytes(self, context: int) -> int:
        """See BlockSpec."""
        values = max(_MAX_GATHERED_VALUES, context * self.num_kv_heads * self.head_dim)
        return 3 * 4 * _QUERY_TILE * self.num_heads * context + 2 * 4 * values

    def work(self, context: int, row_bytes: RowBytes) -> Work:
        """See BlockSpec."""
        seen = context if self.window is None else min(self.window, context)
        return Work(
            seen * self.state.token_bytes(row_bytes), 4 * self.num_heads * self.head_dim * seen
        )

    def launches(self, *, is_fused: bool) -> int:
        """See BlockSpec: the rotation, and the attention itself."""
        return 2

    def describe(self) -> str:
        """See BlockSpec."""
        norms = ", norms of heads" if self.has_head_norms else ""
        window = "" if self.window is None else f", window of {self.window}"
        return (
            f"{self.num_heads} heads of {self.head_dim} with {self.num_kv_heads} of keys"
            f"{norms}{window}"
        )

    def build(self, parts: Parts) -> Attention:
        """See BlockSpec."""
        qkv, output = self.products
        norms = None
        if self.has_head_norms:
            query, key = (RMSNorm(parts.vector(name), self.eps) for name in self.vectors)
            norms = HeadNorms(query, key)
        return Attention(
            self,
            parts.linear(*qkv.names),
            parts.linear(*output.names),
            norms,
            parts.rope(self.rope, self.head_dim),
        )


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms on each query and key head."""

    query: RMSNorm
    key: RMSNorm


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention with its weights."""

    spec: AttentionSpec
    qkv_proj: Projection
    o_proj: Projection
    norms: HeadNorms | None
    rope: RopeTable

    @property
    def products(self) -> tuple[Projection, ...]:
        """See Block."""
        return self.qkv_proj, self.o_proj

    def __call__(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """See Block."""
        return self.o_proj(self.inner(x, inputs))

    def inner(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """See Block: the heads' outputs side by side, [num_tokens, num_heads · head_dim]."""
        spec, norms, batch = self.spec, self.norms, inputs.batch
        cache, tables = inputs.cache, inputs.tables
        assert cache is not None
        assert tables is not None
        rotation = inputs.rotations[self.rope]
        heads = spec.num_heads + 2 * spec.num_kv_heads
        query = inputs.ops.rotate_and_store(
            self.qkv_proj(x).view(x.shape[0], heads, spec.head_dim),
            rotation.cos,
            rotation.sin,
            cache,
            tables.slot_mapping,
            query_norm=None if norms is None else norms.query.weight,
            key_norm=None if norms is None else norms.key.weight,
            eps=0.0 if norms is None else norms.query.eps,
        )
        attended = inputs.ops.paged_attention(
            query,
            cache,
            block_tables=tables.block_tables,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            scale=spec.head_dim**-0.5,
            window=spec.window,
        )
        return attended.flatten(1)
