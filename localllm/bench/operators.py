"""Each operator on its own, at the sizes of a model: time, rate, share of the limit, and speed
relative to torch's.
"""

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.bench.results import Result, Spread, Suite
from localllm.bench.subject import Subject
from localllm.cost.rates import Rates, Roofline, measure_rates, timed
from localllm.model.architecture import Architecture, layer_name
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.linear import packed_linear
from localllm.model.packed.weight import PackedWeight
from localllm.model.random_weights import RandomWeights
from localllm.model.weights import dense_weight
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.compiling.traits import Arithmetic

ROWS = (1, 16, 512)
CONTEXT = 1024
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One operator on one set of inputs: our implementation and torch's."""

    name: str
    conditions: dict[str, int]
    own: Callable[[], object]
    plain: Callable[[], object]
    num_bytes: int
    operations: int
    arithmetic: Arithmetic


class OperatorSuite(Suite):
    """The operators in a subject's table, alternating with torch's."""

    def __init__(self, subject: Subject, repeats: int) -> None:
        self._subject, self._repeats = subject, repeats
        self._results: list[Result] = []
        self._limits: Rates | None = None

    @property
    def limits(self) -> Rates | None:
        """The rates measured before the first operator."""
        return self._limits

    def results(self) -> list[Result]:
        """The results so far."""
        return list(self._results)

    @torch.inference_mode()
    def run(self, progress: Callable[[str], None]) -> None:
        """Measure every case."""
        self._limits = limits = measure_rates(self._subject.device)
        for case in _cases(self._subject):
            progress(case.name)
            self._results.append(self._measure(case, limits))

    def _measure(self, case: Case, limits: Rates) -> Result:
        device = self._subject.device
        timed(case.own, device), timed(case.plain, device)
        own_s, plain_s = [], []
        for _ in range(10 * self._repeats):
            own_s.append(timed(case.own, device))
            plain_s.append(timed(case.plain, device))
        return operator_row(case, own_s, plain_s, limits)


def operator_row(case: Case, own_s: list[float], plain_s: list[float], limits: Rates) -> Result:
    """The row of a case, from the alternating times of both implementations."""
    seconds = statistics.median(own_s)
    roofline = Roofline.of(case.num_bytes, case.operations, limits, case.arithmetic)
    times = Spread.of([plain / own for own, plain in zip(own_s, plain_s, strict=True)])
    return Result(
        "operators",
        case.name,
        dict(case.conditions),
        {
            "seconds": Spread.of(own_s),
            "bytes_per_s": case.num_bytes / seconds,
            "operations_per_s": case.operations / seconds,
            "share_of_limit": roofline.seconds / seconds,
            "bound": roofline.bound,
            "times_torch": times,
        },
        f"{roofline.verdict(seconds)}; {times.median:.1f} times torch's speed",
    )


def _cases(subject: Subject) -> Iterator[Case]:
    """Every operator in the table, for one row, a batch and a prompt."""
    bench = _Inputs(
        subject.architecture, subject.decoder.model.ops, subject.decoder.dtype, subject.device
    )
    for rows in ROWS:
        yield from bench.norms(rows)
        for mlp in subject.architecture.blocks_of(GatedMLPSpec):
            yield bench.gate(rows, mlp)
        found = subject.architecture.attentions()
        for rotated in subject.architecture.rotations():
            yield bench.rotation(rows, rotated)
        for sizes in dict.fromkeys(replace(each, window=None) for each in found):
            yield bench.attention(sizes, num_seqs=1 if rows == ROWS[-1] else rows, rows=rows)
    for rows in ROWS:
        yield from _products(subject, bench, rows)


class _Inputs:
    """Makes cases: inputs at a model's sizes, and both implementations."""

    def __init__(
        self, architecture: Architecture, ops: Ops, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.architecture, self.ops, self.device = architecture, ops, device
        self.dtype = dtype
        self.between = torch.float32 if ops.traits.wide_rows else dtype

    def values(self, *shape: int) -> Tensor:
        """Random inputs."""
        return torch.randn(shape, device=self.device).to(self.between)

    def norms(self, rows: int) -> Iterator[Case]:
        """The norm, and the norm of a sum with the residual."""
        hidden, eps = self.architecture.hidden_size, self.architecture.norm.eps
        x, residual = self.values(rows, hidden), self.values(rows, hidden)
        weight = self.values(hidden)
        yield self._case(
            "rms_norm",
            rows,
            lambda o: o.rms_norm(x, weight, eps),
            2 * x.numel() * x.itemsize,
            4 * x.numel(),
        )
        yield self._case(
            "add_rms_norm",
            rows,
            lambda o: o.add_rms_norm(x, residual, weight, eps),
            4 * x.numel() * x.itemsize,
            5 * x.numel(),
        )

    def gate(self, rows: int, mlp: GatedMLPSpec) -> Case:
        """The gate of a feed-forward."""
        inner = mlp.inner_size
        gate_up = self.values(rows, 2 * inner)
        return self._case(
            f"gate, {mlp.gate}",
            rows,
            lambda o: o.gate(gate_up, mlp.gate),
            3 * rows * inner * gate_up.itemsize,
            5 * rows * inner,
        )

    def _case(
        self,
        name: str,
        rows: int,
        call: Callable[[Ops], object],
        num_bytes: int,
        operations: int,
    ) -> Case:
        return Case(
            name,
            {"rows": rows},
            lambda: call(self.ops),
            lambda: call(TORCH_OPS),
            num_bytes,
            operations,
            "fp32",
        )

    def rotation(self, rows: int, sizes: AttentionSpec) -> Case:
        """Rotary embedding, with norms of heads and the write to the cache where there are such."""
        heads, dim, has_own = sizes.num_heads, sizes.head_dim, sizes.reads is None
        stored = sizes.num_kv_heads * (1 + sizes.has_values) if has_own else 0
        qkv = self.values(rows, heads + stored, dim)
        angles = torch.rand(rows, dim // 2, device=self.device)
        cache = self._cache(sizes, -(-rows // BLOCK_SIZE) + 1) if has_own else None
        slots = torch.arange(BLOCK_SIZE, BLOCK_SIZE + rows, device=self.device)
        norm = self.values(dim) if sizes.has_head_norms else None

        def call(ops: Ops) -> object:
            return ops.rotate_and_store(
                qkv,
                angles.cos(),
                angles.sin(),
                cache,
                slots,
                query_norm=norm,
                key_norm=norm,
                eps=self.architecture.norm.eps,
                has_values=sizes.has_values,
                norms_values=sizes.norms is not None and sizes.norms.has_value,
            )

        kept = 0 if cache is None else rows * sizes.num_kv_heads * dim * cache.key.itemsize
        # Values that are keys are written twice, to the same memory.
        moved = (qkv.numel() + rows * heads * dim) * qkv.itemsize + 2 * kept
        name = "rotate_and_store" if has_own else "rotate"
        return self._case(name, rows, call, moved, 7 * qkv.numel())

    def attention(self, sizes: AttentionSpec, num_seqs: int, rows: int) -> Case:
        """Requests with a context of 1,024 tokens, the last `rows / num_seqs` of them new."""
        device = self.device
        heads, kv_heads, dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        new = rows // num_seqs
        blocks = CONTEXT // BLOCK_SIZE
        cache = self._cache(sizes, num_seqs * blocks + 1)
        tables = torch.arange(1, num_seqs * blocks + 1, dtype=torch.int32, device=device)
        query = self.values(rows, heads, dim)
        starts = torch.arange(0, rows + 1, new, dtype=torch.int32, device=device)
        lengths = torch.full((num_seqs,), CONTEXT, device=device)
        sinks = torch.randn(heads, device=device) if sizes.has_sinks else None

        def call(ops: Ops) -> object:
            return ops.paged_attention(
                query,
                cache,
                block_tables=tables.view(num_seqs, blocks),
                cu_seqlens_q=starts,
                seq_lens=lengths,
                max_query_len=new,
                scale=dim**-0.5,
                window=None,
                cap=sizes.cap,
                sinks=sinks,
                value_dim=sizes.value_dim,
            )

        kept = 1 if sizes.values_are_keys else 2
        kv_bytes = kept * num_seqs * CONTEXT * kv_heads * dim * cache.key.itemsize
        pairs = num_seqs * sum(range(CONTEXT - new + 1, CONTEXT + 1))
        return Case(
            "paged_attention",
            {"rows": rows, "requests": num_seqs, "context": CONTEXT},
            lambda: call(self.ops),
            lambda: call(TORCH_OPS),
            kv_bytes + 2 * query.numel() * query.itemsize,
            4 * heads * dim * pairs,
            "fp32" if self.between == torch.float32 else "bf16",
        )

    def _cache(self, sizes: AttentionSpec, num_blocks: int) -> KVCache:
        shape = (num_blocks, sizes.num_kv_heads, BLOCK_SIZE, sizes.head_dim)
        key, value = (torch.randn(shape, device=self.device).to(self.dtype) for _ in range(2))
        return KVCache(key, key if sizes.values_are_keys else value)


def _products(subject: Subject, inputs: _Inputs, rows: int) -> Iterator[Case]:
    """The largest product of a layer with every kind of weights, against torch's plain product."""
    architecture, device = subject.architecture, subject.device
    weights = {name: shape for name, shape, _ in architecture.layers[0].linears()}
    largest = max(weights, key=lambda name: prod(weights[name]))
    name = f"{layer_name(0)}.{largest}"
    x = inputs.values(rows, weights[largest][1])
    linears = inputs.ops.linears
    for kind in ("bf16", "int4", "int8", "fp8"):
        source = RandomWeights(architecture, kind, device)
        plain = dense_weight(source, f"{name}.weight", inputs.dtype).to(device)
        x_plain = x.to(inputs.dtype)
        if kind == "bf16":
            product = linears.plain(plain, None) if linears is not None else None
            own: Callable[[Tensor], Tensor] = product or (lambda x, w=plain: F.linear(x, w))  # type: ignore[misc]
        else:
            weight: PackedWeight = source.quantized(name, device)
            own = packed_linear(weight, None, inputs.dtype, linears)
        own_bytes = source.linear_bytes(name)
        yield Case(
            f"linear {kind}",
            {"rows": rows, "out": plain.shape[0], "in": plain.shape[1]},
            lambda own=own: own(x),  # type: ignore[misc]
            lambda plain=plain, x_plain=x_plain: F.linear(x_plain, plain),  # type: ignore[misc]
            own_bytes + (x.numel() + rows * plain.shape[0]) * x.itemsize,
            2 * rows * plain.numel(),
            inputs.ops.traits.arithmetic(kind, inputs.dtype),
        )
