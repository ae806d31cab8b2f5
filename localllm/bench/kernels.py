"""Each Triton kernel on its own, at the sizes of a model, against torch's counterpart.

A call is captured in a CUDA graph, so that launches cost nothing, and timed by the device. Before
each replay the L2 cache is overwritten, so that operands come from memory, as in a model. Our
kernel and torch's alternate.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.bench.operators import Case, operator_row
from localllm.bench.results import Result, Suite
from localllm.cost.rates import Rates, measure_rates
from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.block import LinearGroup
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.operators.graph_timer import GraphTimer, Timer
from localllm_kernels import TORCH_OPS, triton_ops
from localllm_kernels.attention.kv_cache import CODE_LIMITS, KVCache, quantize_rows, row_bytes
from localllm_kernels.compiling.choice import Choice
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.products.fp8_matmul import fp8_matmul
from localllm_kernels.products.int4_matmul import MAX_TILE_ROWS, int4_matmul
from localllm_kernels.products.int4_weight import PackedInt4
from localllm_kernels.products.int8_matmul import int8_matmul
from localllm_kernels.sampling.sample import SamplingRows, sample

ROWS = (1, 16, 64, 512)
GROUP = 128
BLOCK_SIZE = 16
DECODE_CONTEXT, PREFILL_TOKENS = 16_384, 8192


class KernelSuite(Suite):
    """The kernels at the sizes of a model, alternating with torch's operators.

    `timer`: None times graphs on `device`; `limits`: None measures them there.
    """

    def __init__(
        self,
        architecture: Architecture,
        device: torch.device,
        repeats: int,
        timer: Timer | None = None,
        limits: Rates | None = None,
    ) -> None:
        self._architecture, self._device, self._repeats = architecture, device, repeats
        self._timer, self._limits = timer, limits
        self._results: list[Result] = []

    @property
    def limits(self) -> Rates | None:
        """The rates measured before the first kernel."""
        return self._limits

    def results(self) -> list[Result]:
        """The results so far."""
        return list(self._results)

    @torch.inference_mode()
    def run(self, progress: Callable[[str], None]) -> None:
        """Measure every case."""
        if self._limits is None:
            self._limits = measure_rates(self._device)
        timer = self._timer or GraphTimer(self._device)
        for case in KernelCases(self._architecture, self._device).all():
            progress(f"{case.name}, {case.conditions}")
            self._results.append(self._measure(case, timer, self._limits))
            if isinstance(timer, GraphTimer):
                timer.forget()

    def _measure(self, case: Case, timer: Timer, limits: Rates) -> Result:
        timer(case.own), timer(case.plain)
        own_s, plain_s = [], []
        for _ in range(10 * self._repeats):
            own_s.append(timer(case.own))
            plain_s.append(timer(case.plain))
        return operator_row(case, own_s, plain_s, limits)


class KernelCases:
    """Makes cases: inputs at a model's sizes, our kernel and torch's counterpart."""

    def __init__(
        self,
        architecture: Architecture,
        device: torch.device,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.architecture, self.device, self.dtype = architecture, device, dtype
        self.workspace, self.ops = Workspace(device), triton_ops(device.type)
        self.by_fragments = triton_ops(device.type, choice=Choice(key_fragments=True))
        self.fragments = Workspace(device, fragment_rows=range(1, MAX_TILE_ROWS + 1))

    def all(self) -> Iterator[Case]:
        """Products, attention, norms and gates, sampling."""
        for group in self.products():
            for rows in ROWS:
                yield from self.product_cases(group.kind, group.width_out, group.width_in, rows)
        for sizes in self.attentions():
            for seqs in (1, 8):
                yield self.attention(sizes, seqs, DECODE_CONTEXT, 1, self.dtype)
                for kv_dtype in CODE_LIMITS:
                    case = sizes, seqs, DECODE_CONTEXT, 1, kv_dtype
                    yield self.attention(*case)
                    yield self.attention(*case, by_fragments=True)
            yield self.attention(sizes, 1, PREFILL_TOKENS, PREFILL_TOKENS, self.dtype)
        for rows in (1, 16):
            yield self.norm(rows)
            for mlp in self.architecture.blocks_of(GatedMLPSpec):
                yield self.gate(rows, mlp)
            yield self.sampling(rows)

    def products(self) -> list[LinearGroup]:
        """The distinct products of the layers."""
        groups = (group for _, group in self.architecture.groups() if group.copy == 0)
        return list(dict.fromkeys(groups))

    def attentions(self) -> list[AttentionSpec]:
        """The distinct attentions, without their windows."""
        found = self.architecture.attentions()
        return list(dict.fromkeys(replace(each, window=None) for each in found))

    def product_cases(self, name: str, width_out: int, width_in: int, rows: int) -> Iterator[Case]:
        """Products with 4-bit and 8-bit weights, against torch's with plain weights."""
        x = self.values(rows, width_in)
        plain = self.values(width_out, width_in)
        codes = torch.randint(16, (width_out, width_in), dtype=torch.uint8, device=self.device)
        scales = self.values(width_out, width_in // GROUP)
        packed = PackedInt4.pack(codes, scales, None, None, None)
        bytes_of_8 = torch.randint(
            -127, 127, (width_out, width_in), dtype=torch.int8, device=self.device
        )
        wide = plain.to(torch.float8_e4m3fn)
        scale, workspace = self.values(width_out), self.workspace
        moved = (rows * (width_in + width_out)) * x.itemsize

        def case(kind: str, own: Callable[[], Tensor], num_bytes: int) -> Case:
            return Case(
                f"{kind} {name}",
                {"rows": rows, "out": width_out, "in": width_in},
                own,
                lambda: F.linear(x, plain),
                num_bytes + moved,
                2 * rows * plain.numel(),
                "bf16",
            )

        int4_bytes = plain.numel() // 2 + scales.numel() * scales.itemsize
        yield case("int4", lambda: int4_matmul(x, packed, workspace), int4_bytes)
        if rows <= MAX_TILE_ROWS:
            fragments = self.fragments
            yield case("int4 fragments", lambda: int4_matmul(x, packed, fragments), int4_bytes)
        yield case(
            "int8", lambda: int8_matmul(x, bytes_of_8, scale, None, workspace), plain.numel()
        )
        block = (1, width_in)
        yield case(
            "fp8",
            lambda: fp8_matmul(x, wide, scale.float()[:, None], block, None, workspace),
            plain.numel(),
        )

    def attention(
        self,
        sizes: AttentionSpec,
        seqs: int,
        context: int,
        new: int,
        kv_dtype: torch.dtype,
        *,
        by_fragments: bool = False,
    ) -> Case:
        """Attention, against torch's over contiguous plain keys and values, which has neither
        caps nor sinks.
        """
        ops = self.by_fragments if by_fragments else self.ops
        heads, kv_heads, dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        blocks = -(-context // BLOCK_SIZE)
        shape = (seqs * blocks + 1, kv_heads, BLOCK_SIZE, dim)
        key, value = self.values(*shape), self.values(*shape)
        value = key if sizes.values_are_keys else value
        cache = KVCache(key, value)
        if kv_dtype in CODE_LIMITS:
            codes, key_scales = quantize_rows(key, kv_dtype)
            value_codes, value_scales = codes, key_scales
            if not sizes.values_are_keys:
                value_codes, value_scales = quantize_rows(value, kv_dtype)
            cache = KVCache(codes, value_codes, key_scales, value_scales)
        query = self.values(seqs * new, heads, dim)
        order = torch.randperm(seqs * blocks, device=self.device).add(1).int()
        starts = torch.arange(0, seqs * new + 1, new, dtype=torch.int32, device=self.device)
        lengths = torch.full((seqs,), context, device=self.device)
        flat = self.values(seqs, heads, new, dim)
        keys, values = (self.values(seqs, kv_heads, context, dim) for _ in range(2))
        sinks = torch.randn(heads, device=self.device) if sizes.has_sinks else None
        pairs = seqs * (new * context - new * (new - 1) // 2)
        kept = 1 if sizes.values_are_keys else 2
        kv_bytes = kept * seqs * context * kv_heads * row_bytes(dim, kv_dtype)
        name = str(kv_dtype).removeprefix("torch.") + (" fragments" if by_fragments else "")
        return Case(
            f"attention {'prefill' if new > 1 else 'decode'} {name}",
            {"rows": seqs * new, "context": context},
            lambda: ops.paged_attention(
                query,
                cache,
                block_tables=order.view(seqs, blocks),
                cu_seqlens_q=starts,
                seq_lens=lengths,
                max_query_len=new,
                scale=dim**-0.5,
                window=None,
                cap=sizes.cap,
                sinks=sinks,
                value_dim=sizes.value_dim,
            ),
            lambda: F.scaled_dot_product_attention(
                flat, keys, values, is_causal=new > 1, enable_gqa=True
            ),
            kv_bytes + 2 * query.numel() * query.itemsize,
            4 * heads * dim * pairs,
            "bf16",
        )

    def norm(self, rows: int) -> Case:
        """The norm with the residual sum."""
        hidden = self.architecture.hidden_size
        x, residual, weight = (
            self.values(rows, hidden),
            self.values(rows, hidden),
            self.values(hidden),
        )
        return Case(
            "add_rms_norm",
            {"rows": rows},
            lambda: self.ops.add_rms_norm(x, residual, weight, 1e-5),
            lambda: TORCH_OPS.add_rms_norm(x, residual, weight, 1e-5),
            4 * x.numel() * x.itemsize,
            5 * x.numel(),
            "fp32",
        )

    def gate(self, rows: int, mlp: GatedMLPSpec) -> Case:
        """The gate of a feed-forward."""
        inner = mlp.inner_size
        gate_up = self.values(rows, 2 * inner)
        return Case(
            f"gate, {mlp.gate}",
            {"rows": rows},
            lambda: self.ops.gate(gate_up, mlp.gate),
            lambda: TORCH_OPS.gate(gate_up, mlp.gate),
            3 * rows * inner * gate_up.itemsize,
            5 * rows * inner,
            "fp32",
        )

    def sampling(self, rows: int) -> Case:
        """Top-k and top-p over the whole vocabulary, against torch's argmax alone."""
        logits = torch.randn(rows, self.architecture.vocab_size, device=self.device)

        def column(value: float, dtype: torch.dtype) -> Tensor:
            return torch.full((rows,), value, dtype=dtype, device=self.device)

        slots = torch.arange(rows, dtype=torch.int32, device=self.device)
        asked = SamplingRows(
            slots,
            slots.long(),
            column(0.7, torch.float32),
            column(20, torch.int32),
            column(0.95, torch.float32),
            column(0, torch.float32),
            column(7, torch.int64),
        )
        return Case(
            "sample top-k 20, top-p 0.95, against a maximum",
            {"rows": rows},
            lambda: sample(logits, asked),
            lambda: logits.argmax(dim=-1),
            logits.numel() * logits.itemsize,
            logits.numel(),
            "fp32",
        )

    def values(self, *shape: int) -> Tensor:
        """Random values."""
        return torch.randn(shape, device=self.device).to(self.dtype)
