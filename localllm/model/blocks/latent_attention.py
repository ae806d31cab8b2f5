"""Multi-head latent attention: the cache holds one short row for each token, which all heads share.

A token's row is its latent c, `latent_rank` values after a norm, and one key of `rope_dim` values
that are rotated. A head's key is (W_uk c, rotated key) and its value W_uv c. None of these is
computed, since products may be taken in another order:

    query · (W_uk c) = (W_ukᵀ query) · c,     Σ weight · (W_uv c) = W_uv Σ weight · c

So a query of (W_ukᵀ query, its rotated part) attends to the rows themselves: one key head of
`latent_rank + rope_dim`, whose values are its keys. Source: DeepSeek-AI 2024, "DeepSeek-V2" (arXiv
2405.04434), section 2.1; both products in another order: its section 2.1.2.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.model.blocks.attention import AttentionSpec, Scores
from localllm.model.blocks.block import (
    Block,
    BlockInputs,
    BlockSpec,
    InputsFrom,
    KVState,
    LinearGroup,
    Parts,
    RowBytes,
    Work,
)
from localllm.model.norm import Norm, NormSpec
from localllm.model.rope_config import NO_ROPE, RopeConfig

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection
    from localllm.model.rope import RopeTable
    from localllm_kernels import Ops

_NAME = "self_attn"
# Both norms of latents have it, whatever the config says of other norms.
_EPS = 1e-6
_QUERY_NORM = NormSpec(f"{_NAME}.q_a_layernorm", _EPS)
_LATENT_NORM = NormSpec(f"{_NAME}.kv_a_layernorm", _EPS)
_EXPANSION = f"{_NAME}.kv_b_proj"
_KEYS, _VALUES = f"{_NAME}.k_b_proj", f"{_NAME}.v_b_proj"


@dataclass(frozen=True, slots=True)
class LatentAttentionSpec(BlockSpec):
    """The sizes of a latent attention.

    `query_rank`: width of the latent that queries are computed from, None if they are computed
    from the block's inputs; `latent_rank`: that of the latent of keys and values; `key_dim`: the
    values of a head's query that are not rotated, `rope_dim`: those that are, by `rope`;
    `value_dim`: of a head's value; `scale`: of the scores; `has_bias`: whether the first product
    and the last one have one; `num_hidden`: see Scores; `is_split`: in files (W_ukᵀ, W_uv) of each
    head are two tensors, in that form, else the rows of (W_uk, W_uv) of each are one.
    """

    hidden_size: int
    num_heads: int
    query_rank: int | None
    latent_rank: int
    key_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeConfig
    scale: float
    has_bias: bool = False
    num_hidden: int = 0
    is_split: bool = False

    def hiding(self, num_keys: int) -> LatentAttentionSpec:
        """The same, whose queries do not see the first keys."""
        return replace(self, num_hidden=num_keys)

    @property
    def row_width(self) -> int:
        """Values of a row in the cache."""
        return self.latent_rank + self.rope_dim

    @property
    def query_width(self) -> int:
        """Values of all heads' queries, as the checkpoint has them."""
        return self.num_heads * (self.key_dim + self.rope_dim)

    @property
    def over_rows(self) -> AttentionSpec:
        """The attention to the rows of the cache, as operators compute it."""
        return AttentionSpec(
            self.hidden_size,
            self.num_heads,
            1,
            self.row_width,
            NO_ROPE,
            scores=Scores(self.scale, num_hidden=self.num_hidden),
            has_values=False,
            value_dim=self.latent_rank,
        )

    @property
    def rotations(self) -> tuple[AttentionSpec, AttentionSpec]:
        """What operators rotate and store, as attentions: the rotated parts of all queries and of
        the key, without a cache; and the row, alone, by no angle.
        """
        count, width = self.num_heads + 1, self.rope_dim
        turned = AttentionSpec(self.hidden_size, count, 1, width, self.rope, reads=0)
        return turned, replace(self.over_rows, num_heads=0)

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        first: tuple[tuple[str, int], ...] = ((f"{_NAME}.q_proj", self.query_width),)
        queries: tuple[LinearGroup, ...] = ()
        if self.query_rank is not None:
            first = ((f"{_NAME}.q_a_proj", self.query_rank),)
            linears = ((f"{_NAME}.q_b_proj", self.query_width),)
            queries = (LinearGroup("queries", linears, self.query_rank, inputs=InputsFrom.OTHER),)
        row = (f"{_NAME}.kv_a_proj_with_mqa", self.row_width)
        output = ((f"{_NAME}.o_proj", self.hidden_size),)
        inner, other = self.num_heads * self.value_dim, InputsFrom.OTHER
        return (
            LinearGroup("latents", (*first, row), self.hidden_size, self.has_bias),
            *queries,
            *self._expansions,
            LinearGroup("output", output, inner, self.has_bias, inputs=other),
        )

    @property
    def _expansions(self) -> tuple[LinearGroup, ...]:
        def by_head(name: str, width_out: int, width_in: int) -> LinearGroup:
            rows, other = ((name, self.num_heads * width_out),), InputsFrom.OTHER
            return LinearGroup("heads", rows, width_in, inputs=other, is_kept=True, is_dense=True)

        if not self.is_split:
            return (by_head(_EXPANSION, self.key_dim + self.value_dim, self.latent_rank),)
        keys = by_head(_KEYS, self.latent_rank, self.key_dim)
        return keys, by_head(_VALUES, self.value_dim, self.latent_rank)

    @property
    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        shapes = {f"{_LATENT_NORM.name}.weight": (self.latent_rank,)}
        if self.query_rank is not None:
            shapes[f"{_QUERY_NORM.name}.weight"] = (self.query_rank,)
        return shapes

    @property
    def state(self) -> KVState:
        return KVState(1, self.row_width, None, values_are_keys=True)

    @property
    def workspace(self) -> int:
        """Queries for the rows, what they find, and what is before and after."""
        of_head = 3 * self.row_width + 2 * (self.key_dim + self.rope_dim) + self.value_dim
        return self.num_heads * of_head + 3 * self.row_width + 2 * (self.query_rank or 0)

    def gathered_bytes(self, context: int) -> int:
        return self.over_rows.gathered_bytes(context)

    def work(self, context: int, row_bytes: RowBytes) -> Work:
        of_key = 2 * self.num_heads * (self.row_width + self.latent_rank)
        return Work(context * self.state.token_bytes(row_bytes), context * of_key)

    def launches(self, *, is_fused: bool) -> int:
        """The norms, what is put side by side, the rotation, the write to the cache,
        the attention, and the second product by head.
        """
        return 8 if self.query_rank is not None else 7

    def describe(self) -> str:
        queries = "" if self.query_rank is None else f", queries of {self.query_rank}"
        return (
            f"{self.num_heads} heads of {self.key_dim} and {self.rope_dim} with values of "
            f"{self.value_dim} over latents of {self.latent_rank}{queries}"
        )

    def build(self, parts: Parts) -> LatentAttention:
        first, *rest = self.products
        middle, output = rest[: self.query_rank is not None], rest[-1]
        query_norm = None
        if middle:
            query_norm = _QUERY_NORM.with_weight(parts.vector(f"{_QUERY_NORM.name}.weight"))
        first_order, query_order = self._orders()
        keys, values = self._by_head(parts)
        return LatentAttention(
            self,
            parts.linear(*first.names, order=first_order),
            parts.linear(*middle[0].names, order=query_order) if middle else None,
            keys,
            values,
            parts.linear(*output.names),
            query_norm,
            _LATENT_NORM.with_weight(parts.vector(f"{_LATENT_NORM.name}.weight")),
            parts.rope(self.rope, self.rope_dim),
            parts.rope(NO_ROPE, self.row_width),
        )

    def _by_head(self, parts: Parts) -> tuple[Projection, Projection]:
        if self.is_split:
            whole = slice(None)
            keys = parts.heads(_KEYS, self.num_heads, whole)
            return keys, parts.heads(_VALUES, self.num_heads, whole)
        key_rows, value_rows = slice(0, self.key_dim), slice(self.key_dim, None)
        keys = parts.heads(_EXPANSION, self.num_heads, key_rows, is_transposed=True)
        return keys, parts.heads(_EXPANSION, self.num_heads, value_rows)

    def _orders(self) -> tuple[list[int] | None, list[int] | None]:
        """The rows of the checkpoint's first product, and those of its queries, with the rotated
        ones as the rotation wants them; None where they are.
        """
        turned, width = self.rope.order(self.rope_dim), self.key_dim + self.rope_dim
        if turned is None:
            return None, None
        of_head = [*range(self.key_dim), *(self.key_dim + i for i in turned)]
        queries = [head * width + i for head in range(self.num_heads) for i in of_head]
        before = queries if self.query_rank is None else [*range(self.query_rank)]
        start = len(before) + self.latent_rank
        return [*before, *range(len(before), start), *(start + i for i in turned)], queries


@dataclass(frozen=True, slots=True)
class LatentAttention(Block):
    """Latent attention with its weights.

    `first`: queries or their latents, and rows of the cache; `queries`: from their latents, normed
    by `query_norm`; `keys`: from each head's query to one for latents; `values`: from each head's
    sum of latents to its value; `rope`: of the rotated parts; `still`: a rotation by no angle, with
    which rows are stored as they are.
    """

    spec: LatentAttentionSpec
    first: Projection
    queries: Projection | None
    keys: Projection
    values: Projection
    o_proj: Projection
    query_norm: Norm | None
    latent_norm: Norm
    rope: RopeTable
    still: RopeTable

    @property
    def products(self) -> tuple[Projection, ...]:
        """Of the product by head, that of queries."""
        middle = () if self.queries is None else (self.queries,)
        return self.first, *middle, self.keys, self.o_proj

    def inner(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """The heads' outputs side by side, [num_tokens, num_heads · value_dim]."""
        spec, batch, tables, cache = self.spec, inputs.batch, inputs.tables, inputs.cache
        assert cache is not None
        assert tables is not None
        query, row = self._query_and_row(self.first(x), inputs, tables.slot_mapping)
        still = inputs.rotations[self.still]
        inputs.ops.rotate_and_store(
            row[:, None],
            still.cos,
            still.sin,
            cache,
            tables.slot_mapping,
            has_values=False,
            uncoded_slots=tables.uncoded_slots,
        )
        attended = inputs.ops.paged_attention(
            query,
            cache,
            block_tables=tables.block_tables,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            scale=spec.scale,
            window=None,
            num_hidden=spec.num_hidden,
            value_dim=spec.latent_rank,
            uncoded_tables=tables.uncoded_tables,
        )
        return self.values(attended.flatten(1))

    def query_inputs(self, x: Tensor, ops: Ops) -> Tensor:
        """The inputs of `queries`, [num_tokens, query_rank]; `x`: those of the block."""
        return self._normed_latents(self.first(x)[:, : -self.spec.row_width], ops)

    def _normed_latents(self, latents: Tensor, ops: Ops) -> Tensor:
        assert self.query_norm is not None
        return self.query_norm(latents.contiguous(), ops)

    def _query_and_row(
        self, first: Tensor, inputs: BlockInputs, slots: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries for the rows of the cache, [num_tokens, num_heads, row_width], and the tokens'
        own rows, [num_tokens, row_width].
        """
        import torch

        spec, ops = self.spec, inputs.ops
        query, row = first[:, : -spec.row_width], first[:, -spec.row_width :]
        if self.queries is not None:
            query = self.queries(self._normed_latents(query, ops))
        heads = query.reshape(len(query), spec.num_heads, -1)
        rotation = inputs.rotations[self.rope]
        turned = ops.rotate_and_store(
            torch.cat((heads[..., spec.key_dim :], row[:, None, spec.latent_rank :]), dim=1),
            rotation.cos,
            rotation.sin,
            None,
            slots,
        )
        latent = self.latent_norm(row[:, : spec.latent_rank].contiguous(), ops)
        for_latents = self.keys(heads[..., : spec.key_dim].flatten(1))
        for_latents = for_latents.view(len(query), spec.num_heads, -1)
        query = torch.cat((for_latents, turned[:, :-1]), dim=-1)
        return query, torch.cat((latent, turned[:, -1]), dim=-1)
