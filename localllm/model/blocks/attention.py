"""Grouped-query attention over the paged cache; query, key and value come from one product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from localllm.model.blocks.block import (
    Block,
    BlockInputs,
    BlockSpec,
    InputRows,
    InputsFrom,
    KVState,
    LinearGroup,
    Parts,
    RowBytes,
    Work,
)
from localllm.model.norm import Norm, NormSpec
from localllm.model.rope_config import RopeConfig

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.inputs import GroupTables
    from localllm.model.linear import Projection
    from localllm.model.rope import RopeTable, Rotation
    from localllm_kernels import Ops
    from localllm_kernels.attention.kv_cache import KVCache

_SINKS = "self_attn.sinks"
# Memory of the reference attention, attention/paged_attention.py: a tile of queries against the
# context (scores, weights, mask), and gathered keys and values in float32.
_QUERY_TILE = 64
_MAX_GATHERED_VALUES = 1 << 20


@dataclass(frozen=True, slots=True)
class QueryKeyNorms:
    """Norms of queries and keys, by the names of their weights.

    Of each head before the rotation (Qwen3), or with `is_late` after it (Hunyuan); or with
    `is_whole` of all heads as one row (OLMo 2). `has_value`: values are normed too, without a
    weight (Gemma 4). `offset`, `rounds_last`: see NormSpec.
    """

    eps: float
    query: str = "self_attn.q_norm"
    key: str = "self_attn.k_norm"
    offset: float = 0.0
    rounds_last: bool = False
    is_whole: bool = False
    is_late: bool = False
    has_value: bool = False

    def spec(self, name: str) -> NormSpec:
        """The norm whose weight is `name`."""
        return NormSpec(name, self.eps, self.offset, rounds_last=self.rounds_last)


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries are multiplied by 1 + beta · ln(1 + ⌊position / period⌋) (Ministral 3)."""

    beta: float
    period: int

    def factors(self, positions: Tensor) -> Tensor:
        """Of queries at `positions`, [num_tokens]; float32."""
        # In double precision, since a logarithm's last bit depends on its place in the batch.
        turns = 1 + (positions // self.period).double()
        return (1 + self.beta * turns.log()).float()


@dataclass(frozen=True, slots=True)
class Scores:
    """How the scores of queries and keys become weights on values.

    They are multiplied by `scale`, head_dim^-½ if None; `cap`, `has_sinks` (one for each head),
    `num_hidden` (the first keys, which no query sees): see paged_attention_reference.
    """

    scale: float | None = None
    cap: float | None = None
    growth: QueryGrowth | None = None
    has_sinks: bool = False
    num_hidden: int = 0


@dataclass(frozen=True, slots=True)
class AttentionLinears:
    """The linears of an attention, as its checkpoint has them.

    `name`: before the names of those of queries, keys and values; `output`: the last one's;
    `is_whole`: queries, keys and values are one; `has_gate`: queries have a gate for each of their
    values, behind those of a head, whose sigmoid is a factor on what the head has found
    (Qwen3-Next); `head_gate`: the name of one whose sigmoids are factors on each head (LFM3);
    `width_in`: of the inputs, where that is not `hidden_size`.
    """

    name: str = "self_attn"
    output: str = "self_attn.o_proj"
    qkv_bias: bool = False
    o_bias: bool = False
    is_whole: bool = False
    has_gate: bool = False
    head_gate: str | None = None
    width_in: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionSpec(BlockSpec):
    """The sizes of an attention.

    `has_values`: else values are the keys before their norm and rotation; `reads`: the layer whose
    keys and values it takes, since it has none; `value_dim`: values are the first so many numbers
    of the keys in the cache, see latent_attention.py; None in a layer of this kind.
    """

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    window: int | None = None
    norms: QueryKeyNorms | None = None
    scores: Scores = Scores()
    linears: AttentionLinears = AttentionLinears()
    has_values: bool = True
    reads: int | None = None
    value_dim: int | None = None

    def hiding(self, num_keys: int) -> AttentionSpec:
        """The same, whose queries do not see the first keys."""
        return replace(self, scores=replace(self.scores, num_hidden=num_keys))

    @property
    def score_scale(self) -> float:
        """What the scores are multiplied by."""
        return self.head_dim**-0.5 if self.scores.scale is None else self.scores.scale

    @property
    def values_are_keys(self) -> bool:
        """Whether values are the keys as they are cached."""
        return self.value_dim is not None

    @property
    def has_head_norms(self) -> bool:
        """Whether each head is normed before it is rotated, which the operator does by itself."""
        return self.norms is not None and not (self.norms.is_whole or self.norms.is_late)

    @property
    def has_plain_rows(self) -> bool:
        """Whether its first product gives what is cached, and queries and maybe gates alone."""
        has_value_norm = self.norms is not None and self.norms.has_value
        is_plain = self.has_values and self.reads is None and self.linears.head_gate is None
        return is_plain and not has_value_norm

    @property
    def is_plain(self) -> bool:
        """Whether all of it is two products, the rotation and attention itself as Llama has it."""
        if self.linears.has_gate:
            return False
        has_plain_norms = self.norms is None or self.has_head_norms
        scores = self.scores
        has_plain_scores = scores.cap is None and not scores.has_sinks and scores.growth is None
        return self.has_plain_rows and has_plain_norms and has_plain_scores

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        linears = self.linears
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qkv: tuple[tuple[str, int], ...] = (
            (f"{linears.name}.q_proj", (2 if linears.has_gate else 1) * queries),
            (f"{linears.name}.k_proj", keys),
            (f"{linears.name}.v_proj", keys),
        )
        qkv = qkv[:1] if self.reads is not None else qkv if self.has_values else qkv[:2]
        group, first_value = self.num_heads // self.num_kv_heads, 0
        if linears.is_whole:
            qkv = (("self_attn.qkv_proj", queries + 2 * keys),)
            first_value = queries + keys
        values: InputRows | InputsFrom = InputsFrom.OTHER
        if len(qkv) != 2 and self.reads is None and not (self.norms and self.norms.has_value):
            values = InputRows(qkv[-1][0], self.num_kv_heads, group, self.head_dim, first_value)
        output = ((linears.output, self.hidden_size),)
        width = self.hidden_size if linears.width_in is None else linears.width_in
        products = (
            LinearGroup("qkv", qkv, width, linears.qkv_bias),
            LinearGroup("output", output, queries, linears.o_bias, inputs=values),
        )
        if linears.head_gate is None:
            return products
        gate = ((linears.head_gate, self.num_heads),)
        return (LinearGroup("head gate", gate, width, is_kept=True), *products)

    @property
    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        shapes = {name: (width,) for name, width in self._norm_widths().items()}
        return {**shapes, _SINKS: (self.num_heads,)} if self.scores.has_sinks else shapes

    def _norm_widths(self) -> dict[str, int]:
        """The widths of the norms' weights: that of queries, and that of keys if there are keys."""
        if self.norms is None:
            return {}
        heads = (self.num_heads, self.num_kv_heads) if self.norms.is_whole else (1, 1)
        names = (self.norms.query, self.norms.key)
        widths = {
            f"{name}.weight": count * self.head_dim
            for name, count in zip(names, heads, strict=True)
        }
        if self.reads is not None:
            del widths[f"{self.norms.key}.weight"]
        return widths

    @property
    def state(self) -> KVState | None:
        return self._seen if self.reads is None else None

    @property
    def unread(self) -> tuple[str, ...]:
        """Linears and norms of the layer that its files may hold though nothing reads them."""
        if self.reads is None:
            return ()
        return tuple(f"self_attn.{kind}_{part}" for kind in "kv" for part in ("proj", "norm"))

    @property
    def _seen(self) -> KVState:
        """The state that queries attend to."""
        return KVState(self.num_kv_heads, self.head_dim, self.window)

    @property
    def workspace(self) -> int:
        return 3 * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    def gathered_bytes(self, context: int) -> int:
        values = max(_MAX_GATHERED_VALUES, context * self.num_kv_heads * self.head_dim)
        return 3 * 4 * _QUERY_TILE * self.num_heads * context + 2 * 4 * values

    def work(self, context: int, row_bytes: RowBytes) -> Work:
        seen = context if self.window is None else min(self.window, context)
        return Work(
            seen * self._seen.token_bytes(row_bytes), 4 * self.num_heads * self.head_dim * seen
        )

    def launches(self, *, is_fused: bool) -> int:
        """The rotation, and the attention itself."""
        return 2

    def describe(self) -> str:
        parts = {
            "norms of heads": self.norms is not None,
            f"window of {self.window}": self.window is not None,
            f"scores within {self.scores.cap}": self.scores.cap is not None,
            "queries that grow": self.scores.growth is not None,
            "keys as values": not self.has_values,
            "keys of another layer": self.reads is not None,
            "sinks": self.scores.has_sinks,
            "a gate": self.linears.has_gate,
            "a gate for each head": self.linears.head_gate is not None,
        }
        words = "".join(f", {name}" for name, is_there in parts.items() if is_there)
        return f"{self.num_heads} heads of {self.head_dim} with {self.num_kv_heads} of keys{words}"

    def build(self, parts: Parts) -> Attention:
        *_, qkv, output = self.products
        norms = None
        if self.norms is not None:
            found = [self._norm(parts, name) for name in self._norm_widths()]
            norms = HeadNorms(found[0], found[1] if len(found) > 1 else None)
        return Attention(
            self,
            parts.linear(*qkv.names, order=self._row_order()),
            parts.linear(*output.names),
            norms,
            parts.rope(self.rope, self.head_dim),
            parts.vector(_SINKS).float() if self.scores.has_sinks else None,
            None if self.linears.head_gate is None else parts.linear(self.linears.head_gate),
        )

    def _norm(self, parts: Parts, name: str) -> Norm:
        assert self.norms is not None
        weight, order = parts.vector(name), self.rope.order(self.head_dim)
        if order is not None:
            weight = weight.view(-1, self.head_dim)[:, list(order)].flatten()
        return self.norms.spec(name).with_weight(weight)

    def _row_order(self) -> list[int] | None:
        """The rows of the product of queries, keys and values as they are computed with: those of
        queries and keys as the rotation wants them, values as they are, gates last. None where that
        is the checkpoint's order.
        """
        order, width = self.rope.order(self.head_dim), self.head_dim
        has_gate = self.linears.has_gate
        if order is None and not has_gate:
            return None
        turned, stride = order or range(width), 2 * width if has_gate else width
        first_key = self.num_heads * stride
        num_keys = self.num_kv_heads if self.reads is None else 0
        starts = [head * stride for head in range(self.num_heads)]
        starts += [first_key + head * width for head in range(num_keys)]
        rows = [start + i for start in starts for i in turned]
        rows += range(first_key + num_keys * width, self.products[-2].width_out)
        if has_gate:
            starts = [head * stride + width for head in range(self.num_heads)]
            rows += [start + i for start in starts for i in range(width)]
        return rows


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """The norms on each query and key head; no `key` where another layer's keys are read."""

    query: Norm
    key: Norm | None


@dataclass(frozen=True, slots=True)
class Attention(Block):
    """Attention with its weights."""

    spec: AttentionSpec
    qkv_proj: Projection
    o_proj: Projection
    norms: HeadNorms | None
    rope: RopeTable
    sinks: Tensor | None = None  # float32 [num_heads]
    head_gate: Projection | None = None

    @property
    def products(self) -> tuple[Projection, ...]:
        first = () if self.head_gate is None else (self.head_gate,)
        return *first, self.qkv_proj, self.o_proj

    def inner(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """The heads' outputs side by side, [num_tokens, num_heads · head_dim]."""
        spec, batch, tables, cache = self.spec, inputs.batch, inputs.tables, inputs.cache
        assert cache is not None
        assert tables is not None
        scores = spec.scores
        kept = cache if spec.reads is None else None
        qkv, gate = self._split_gate(self.qkv_proj(x))
        query = self._query(qkv, inputs, kept, tables)
        if scores.growth is not None:
            factors = scores.growth.factors(batch.positions)
            query = query * factors.to(query.dtype)[:, None, None]
        attended = inputs.ops.paged_attention(
            query,
            cache,
            block_tables=tables.block_tables,
            cu_seqlens_q=batch.cu_seqlens_q,
            seq_lens=batch.seq_lens,
            max_query_len=batch.max_query_len,
            scale=spec.score_scale,
            window=spec.window,
            cap=scores.cap,
            sinks=self.sinks,
            num_hidden=scores.num_hidden,
            uncoded_tables=tables.uncoded_tables,
        )
        # Not torch's sigmoid, whose vector loop and scalar tail may differ in the last bit.
        if self.head_gate is not None:
            attended = attended / (1 + (-self.head_gate(x)).exp())[:, :, None]
        attended = attended.flatten(1)
        return attended if gate is None else inputs.ops.sigmoid_gate(attended, gate)

    def _split_gate(self, qkv: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, keys and values, and the gates, [num_tokens, num_heads · head_dim]."""
        if not self.spec.linears.has_gate:
            return qkv, None
        width = self.spec.num_heads * self.spec.head_dim
        return qkv[:, :-width].contiguous(), qkv[:, -width:]

    def _query(
        self, qkv: Tensor, inputs: BlockInputs, cache: KVCache | None, tables: GroupTables
    ) -> Tensor:
        """Queries, normed and rotated, [num_tokens, num_heads, head_dim]; keys and values are then
        in the cache, if there is one.
        """
        spec, norms, ops, rotation = self.spec, self.norms, inputs.ops, inputs.rotations[self.rope]
        cos, sin = rotation.cos, rotation.sin
        if norms is not None and not spec.has_head_norms:
            assert spec.norms is not None
            if spec.norms.is_late:
                qkv = self._rotated(qkv, rotation, tables.slot_mapping, ops)
                cos, sin = cos.new_ones(cos.shape), sin.new_zeros(sin.shape)
            qkv, norms = self._normed(qkv, norms, ops), None
        return ops.rotate_and_store(
            qkv.view(len(qkv), -1, spec.head_dim),
            cos,
            sin,
            cache,
            tables.slot_mapping,
            query_norm=None if norms is None else norms.query.weight,
            key_norm=None if norms is None or norms.key is None else norms.key.weight,
            eps=0.0 if norms is None else norms.query.eps,
            has_values=spec.has_values,
            norms_values=spec.norms is not None and spec.norms.has_value,
            uncoded_slots=tables.uncoded_slots,
        )

    def _rotated(self, qkv: Tensor, rotation: Rotation, slots: Tensor, ops: Ops) -> Tensor:
        """Queries and keys rotated, values as they are."""
        keys = self.spec.num_kv_heads * self.spec.head_dim
        heads = qkv[:, :-keys].contiguous().view(len(qkv), -1, self.spec.head_dim)
        turned = ops.rotate_and_store(heads, rotation.cos, rotation.sin, None, slots)
        return _joined((turned.flatten(1), qkv[:, -keys:]))

    def _normed(self, qkv: Tensor, norms: HeadNorms, ops: Ops) -> Tensor:
        """Queries and keys normed, values as they are; [num_tokens, all heads · head_dim]."""
        spec = self.spec
        keys = spec.num_kv_heads * spec.head_dim
        queries = spec.num_heads * spec.head_dim
        assert norms.key is not None
        query, key, value = qkv[:, :queries], qkv[:, queries:-keys], qkv[:, -keys:]
        query = norms.query(query.reshape(-1, len(norms.query.weight)), ops).view_as(query)
        key = norms.key(key.reshape(-1, len(norms.key.weight)), ops).view_as(key)
        return _joined((query, key, value))


def _joined(parts: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat(tuple(parts), dim=-1)
