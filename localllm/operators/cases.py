"""The operators that a model is about to use, on the model's own shapes, with their references.

The result of an operator is compared with torch's in float32, and its time with that of its
alternative. Inputs are random; weights are those of the model's first layer and its head.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.per_layer_gate import PerLayerGateSpec
from localllm.model.blocks.router import RouterSpec
from localllm.model.norm import NormSpec
from localllm.model.paged_kv_cache import empty_cache
from localllm.model.weights import WeightSource
from localllm.operators.case import TOLERANCE, OperatorCase, Sizes, distance, unit_of
from localllm.operators.product_cases import product_cases
from localllm.operators.recurrence_cases import recurrence_cases
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.attention.kv_cache import CODE_LIMITS, KVCache, dequantize_rows, quantize_rows
from localllm_kernels.compiling.choice import ALL_OWN, Choice, Piece
from localllm_kernels.experts.route import route_reference
from localllm_kernels.pointwise.gate import GateKind, parts_of
from localllm_kernels.sampling.sample import SamplingRows, sample_reference

# The largest step between neighbouring codes, relative to the root mean square of a row; codes may
# differ by one if a quotient lies between two.
_CODE_STEPS = {torch.int8: 0.05, torch.float8_e4m3fn: 0.3}
_CONTEXT, _NEW = 1000, 200  # tokens of a request, and of a prompt


def operator_cases(
    source: WeightSource,
    sizes: Sizes,
    device: torch.device,
    tables: Callable[[Choice], Ops],
) -> Iterator[OperatorCase]:
    """Yield every case; its tensors are freed before the next. `tables`: the operators by choice.

    Raises: as `WeightReader`.
    """
    own, architecture = tables(ALL_OWN), sizes.architecture
    cases = _Cases(sizes, device, own)
    attentions = architecture.attentions()
    for rows in (1, 512):
        for is_wide in dict.fromkeys(norm.is_wide for norm in _norms(architecture)):
            yield from cases.norms(rows, is_wide)
        for inner, kind in dict.fromkeys(_gates(architecture)):
            yield cases.gate(rows, inner, kind)
        for attention in architecture.rotations():
            yield cases.rotation(rows, attention)
        for router in dict.fromkeys(spec.router for _, spec in architecture.experts()):
            yield cases.route(rows, router)
    # Two prompts in a step, and a turn after a long conversation, by the many-queries kernel alone.
    many = ([(_CONTEXT, _NEW), (_NEW, _NEW)], [(4 * _CONTEXT, 70)])
    alone = tables(Choice(frozenset([Piece.FEW_QUERIES])))
    for attention in attentions:
        # One request, several requests, and the longest draft that the few-queries kernel takes.
        drafted = max(1, 16 * attention.num_kv_heads // attention.num_heads)
        few = ([(_CONTEXT, 1)], [(1000 // (i + 1) + 17, 1) for i in range(4)], [(300, drafted)])
        for requests in few:
            yield cases.attention(Piece.FEW_QUERIES, requests, attention)
            if sizes.kv_dtype in CODE_LIMITS:
                fragments = tables(Choice(key_fragments=True))
                yield cases.attention(Piece.KEY_FRAGMENTS, requests, attention, fragments, own)
        for requests in many:
            yield cases.attention(Piece.MANY_QUERIES, requests, attention, alone, TORCH_OPS)
        # A prompt and a decoding request in one step, which takes both kernels.
        yield cases.attention(Piece.FEW_QUERIES, [(_CONTEXT, _NEW), (_CONTEXT, 1)], attention)
    yield from recurrence_cases(architecture, sizes.dtype, device, own)
    if own.sample is not None:
        yield cases.sampling(own.sample)
    yield from product_cases(source, sizes, device, tables)


def _norms(architecture: Architecture) -> Iterator[NormSpec]:
    """The norms of the residual stream."""
    yield architecture.norm
    for layer in architecture.layers:
        for place in layer.places:
            yield from place.norms


def _gates(architecture: Architecture) -> Iterator[tuple[int, GateKind]]:
    """The width of each gate, and its function."""
    for block in architecture.blocks():
        if isinstance(block, GatedMLPSpec):
            yield block.inner_size, block.gate
        if isinstance(block, PerLayerGateSpec):
            yield block.width, "gelu"


class _Cases:
    """Cases that need no weights except those of norms, which are random."""

    def __init__(self, sizes: Sizes, device: torch.device, ops: Ops) -> None:
        self._sizes, self._device, self._ops = sizes, device, ops
        self._unit = unit_of(sizes.dtype)

    def norms(self, rows: int, is_wide: bool) -> Iterator[OperatorCase]:
        """The norm, and the norm of a sum; `is_wide`: see NormSpec."""
        hidden, eps = self._sizes.architecture.hidden_size, self._sizes.architecture.norm.eps
        x, residual, weight = (
            self._values(rows, hidden),
            self._values(rows, hidden),
            self._norm_weight(hidden, is_wide),
        )
        wide = ", its weight in float32" if is_wide else ""
        norm: Callable[..., Sequence[Tensor]] = lambda o, x, w: (o.rms_norm(x, w, eps),)  # noqa: E731
        yield self._case(Piece.NORMS, f"norm{wide}", norm, x, weight)
        yield self._case(
            Piece.NORMS,
            f"norm of a sum{wide}",
            lambda o, x, r, w: o.add_rms_norm(x, r, w, eps),
            x,
            residual,
            weight,
        )

    def gate(self, rows: int, inner: int, kind: GateKind) -> OperatorCase:
        """The gate, `inner` values wide."""
        gate_up = self._values(rows, parts_of(kind) * inner)
        return self._case(Piece.GATE, f"gate, {kind}", lambda o, x: (o.gate(x, kind),), gate_up)

    def route(self, rows: int, router: RouterSpec) -> OperatorCase:
        """The choice of experts; its factors are right only if it is."""
        drawn = [torch.rand(router.num_experts, device=self._device) for _ in range(2)]
        vectors = (
            None if name is None else values
            for name, values in zip((router.correction, router.scales), drawn, strict=True)
        )
        how, logits = router.routing(*vectors), self._values(rows, router.num_experts)

        def away() -> float:
            chosen, factors = self._ops.route(logits, how)
            right, exact = route_reference(logits, how)
            if not torch.equal(chosen, right):
                return float("inf")
            return distance(factors, exact, unit_of(torch.float32))

        return OperatorCase(
            Piece.ROUTE,
            f"{router.top_k} of {router.num_experts} experts",
            rows,
            away,
            lambda: self._ops.route(logits, how),
            lambda: route_reference(logits, how),
        )

    def _case(
        self, piece: Piece, name: str, call: Callable[..., Sequence[Tensor]], *values: Tensor
    ) -> OperatorCase:
        return OperatorCase(
            piece,
            name,
            len(values[0]),
            lambda: max(
                distance(found, exact, self._unit)
                for found, exact in zip(
                    call(self._ops, *values),
                    call(TORCH_OPS, *(each.float() for each in values)),
                    strict=True,
                )
            ),
            lambda: call(self._ops, *values),
            lambda: call(TORCH_OPS, *values),
        )

    def rotation(self, rows: int, sizes: AttentionSpec) -> OperatorCase:
        """Rotation with the norms of heads, and the write to the cache."""
        dtype = self._sizes.kv_dtype
        kv_heads, dim = sizes.num_kv_heads, sizes.head_dim
        has_own = sizes.reads is None
        stored = kv_heads * (1 + sizes.has_values) if has_own else 0
        qkv = self._values(rows, sizes.num_heads + stored, dim)
        angles = 6 * torch.rand(rows, dim // 2, device=self._device)
        if sizes.values_are_keys:
            # Key and value are written to the same memory, in any order: they have to be equal.
            angles.zero_()
        cos, sin = angles.cos(), angles.sin()
        norm = None
        if sizes.norms is not None and sizes.has_head_norms:
            norm = self._norm_weight(dim, sizes.norms.spec("").is_wide)
        block = self._sizes.block_size
        num_blocks = -(-rows // block) + 1
        slots = block + torch.randperm(rows, device=self._device)

        def call(ops: Ops, kept: KVCache, qkv: Tensor, norm: Tensor | None) -> Tensor:
            return ops.rotate_and_store(
                qkv,
                cos,
                sin,
                kept if has_own else None,
                slots,
                query_norm=norm,
                key_norm=norm,
                eps=1e-6 if sizes.norms is None else sizes.norms.eps,
                has_values=sizes.has_values,
                norms_values=sizes.norms is not None and sizes.norms.has_value,
            )

        shape = (num_blocks, kv_heads, block, dim)
        own, plain, exact = (
            empty_cache(shape, kind, self._device, values_are_keys=sizes.values_are_keys)
            for kind in (dtype, dtype, torch.float)
        )

        def away() -> float:
            query = call(self._ops, own, qkv, norm)
            right = call(TORCH_OPS, exact, qkv.float(), None if norm is None else norm.float())
            if not has_own:
                return distance(query, right, self._unit)
            of_codes = _CODE_STEPS[dtype] / TOLERANCE if dtype in _CODE_STEPS else self._unit
            return max(
                distance(query, right, self._unit),
                distance(_values_of(own.key, own.key_scales), exact.key, of_codes),
                distance(_values_of(own.value, own.value_scales), exact.value, of_codes),
            )

        return OperatorCase(
            Piece.ROTATION,
            "rotation" if has_own else "rotation of queries alone",
            rows,
            away,
            lambda: call(self._ops, own, qkv, norm),
            lambda: call(TORCH_OPS, plain, qkv, norm),
        )

    def attention(
        self,
        piece: Piece,
        requests: Sequence[tuple[int, int]],
        sizes: AttentionSpec,
        ops: Ops | None = None,
        rival: Ops = TORCH_OPS,
    ) -> OperatorCase:
        """Attention of `requests`: the keys of each, and how many of them are new.

        `ops`: the table to check, by default this library's; `rival`: its alternative.
        """
        own = ops or self._ops
        device, block, window = self._device, self._sizes.block_size, sizes.window
        lengths, new = [keys for keys, _ in requests], [count for _, count in requests]
        rows, longest = sum(new), max(lengths)
        blocks = -(-longest // block)
        shape = (len(lengths) * blocks + 1, sizes.num_kv_heads, block, sizes.head_dim)
        cache, exact = self._filled(shape, values_are_keys=sizes.values_are_keys)
        order = torch.randperm(len(lengths) * blocks, device=device).add(1).int()
        starts = torch.tensor([0, *new], device=device).cumsum(0).int()
        query = self._values(rows, sizes.num_heads, sizes.head_dim)
        keys = torch.tensor(lengths, device=device)
        sinks = torch.randn(sizes.num_heads, device=device) if sizes.has_sinks else None

        def call(ops: Ops, query: Tensor, cache: KVCache) -> Tensor:
            return ops.paged_attention(
                query,
                cache,
                block_tables=order.view(len(lengths), blocks),
                cu_seqlens_q=starts,
                seq_lens=keys,
                max_query_len=max(new),
                scale=sizes.score_scale,
                window=window,
                cap=sizes.cap,
                sinks=sinks,
                value_dim=sizes.value_dim,
            )

        behind = "" if window is None else f", window {window}"
        return OperatorCase(
            piece,
            f"{', '.join(f'{count} of {length}' for length, count in requests)} keys{behind}",
            rows,
            lambda: distance(
                call(own, query, cache), call(TORCH_OPS, query.float(), exact), self._unit
            ),
            lambda: call(own, query, cache),
            lambda: call(rival, query, cache),
        )

    def sampling(self, own: Callable[[Tensor, SamplingRows], Tensor]) -> OperatorCase:
        """A greedy row and rows with filters: the tokens must match, except for one near tie."""
        count, device = 8, self._device
        logits = 4 * torch.randn(count, self._sizes.architecture.vocab_size, device=device)
        index = torch.arange(count, device=device)

        def rows() -> SamplingRows:
            return SamplingRows(
                index.int(),
                index.clone(),
                torch.where(index == 0, 0.0, 0.5 + index / count),
                torch.where(index % 2 == 0, 20, 0).int(),
                torch.where(index % 3 == 0, 1.0, 0.95),
                torch.where(index % 4 == 3, 0.05, 0.0),
                (index + 1) * 0x9E3779B97F4A7C1,
            )

        def away() -> float:
            found = own(logits.clone(), rows())
            return float((found != sample_reference(logits, rows())).sum()) / 1.5

        asked = rows()
        return OperatorCase(
            Piece.SAMPLING,
            "sampling",
            count,
            away,
            lambda: own(logits, asked),
            lambda: sample_reference(logits, asked),
        )

    def _norm_weight(self, width: int, is_wide: bool) -> Tensor:
        weight = 1 + 0.1 * self._values(width)
        return weight.float() if is_wide else weight

    def _values(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device).to(self._sizes.dtype)

    def _filled(self, shape: tuple[int, ...], *, values_are_keys: bool) -> tuple[KVCache, KVCache]:
        """A cache of random keys and values, and the same in float32."""
        dtype, count = self._sizes.kv_dtype, 1 if values_are_keys else 2
        drawn = [torch.randn(shape, device=self._device) for _ in range(count)]
        if dtype not in CODE_LIMITS:
            plain = [each.to(dtype) for each in drawn]
            return KVCache(plain[0], plain[-1]), KVCache(plain[0].float(), plain[-1].float())
        codes, scales = zip(*(quantize_rows(each, dtype) for each in drawn), strict=True)
        exact = [dequantize_rows(*each) for each in zip(codes, scales, strict=True)]
        own = KVCache(codes[0], codes[-1], scales[0], scales[-1])
        return own, KVCache(exact[0], exact[-1])


def _values_of(codes: Tensor, scales: Tensor | None) -> Tensor:
    return codes.float() if scales is None else dequantize_rows(codes, scales)
