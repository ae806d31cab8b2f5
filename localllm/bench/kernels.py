"""Each Triton kernel on its own, at the sizes of a model, against torch's counterpart.

A call is captured in a CUDA graph, so that launches cost nothing, and timed by the device. Before
each replay the L2 cache is overwritten, so that operands come from memory, as in a model. Our
kernel and torch's alternate.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from localllm.bench.operators import BLOCK_SIZE, Clock, Line, OperatorSuite, whole_attentions
from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.operators.attention_cases import attention
from localllm.operators.case import OperatorCase, Setting, Sizes
from localllm.operators.cases import ALL_FRAGMENTS
from localllm.operators.pointwise_cases import Filters, gate, norms, sampling
from localllm.operators.product_cases import drawn_product
from localllm_kernels.attention.cache_arguments import CODES
from localllm_kernels.compiling.choice import Piece
from localllm_kernels.products.int4_matmul import MAX_TILE_ROWS
from localllm_kernels.triton_ops import triton_ops

_FILTERS: Filters = (0.7, 20, 0.95, 0.0)


@dataclass(frozen=True, slots=True)
class KernelInputs:
    """Rows of products, and tokens of a context and of a prompt."""

    rows: tuple[int, ...] = (1, 16, 64, 512)
    decode_context: int = 16_384
    prefill_tokens: int = 8192


WHOLE = KernelInputs()


def kernel_suite(
    architecture: Architecture, device: torch.device, clock: Clock, inputs: KernelInputs = WHOLE
) -> OperatorSuite:
    """The kernels at the sizes of a model, alternating with torch's operators."""
    return OperatorSuite(kernel_lines(architecture, device, inputs), device, clock)


def kernel_lines(
    architecture: Architecture, device: torch.device, inputs: KernelInputs = WHOLE
) -> Iterator[Line]:
    """Products, attention, norms and gates, sampling."""
    dtype = torch.bfloat16
    sizes = Sizes(architecture, dtype, dtype, BLOCK_SIZE)
    on = Setting(sizes, device, triton_ops(device.type))
    second = replace(on, own=triton_ops(device.type, choice=ALL_FRAGMENTS))
    groups = [group for _, group in architecture.groups() if group.copy == 0]
    for group in dict.fromkeys(groups):
        shape = (group.width_out, group.width_in)
        for rows in inputs.rows:
            yield from _products(on, second, group.kind, shape, rows)
    for spec in whole_attentions(on):
        yield from _attentions(on, second, spec, inputs)
    for rows in (1, 16):
        _, norm_of_sum = norms(on, rows, is_wide=False)
        yield Line("add_rms_norm", {"rows": rows}, norm_of_sum)
        for mlp in architecture.blocks_of(GatedMLPSpec):
            case = gate(on, rows, mlp.inner_size, mlp.gate)
            yield Line(case.name, {"rows": rows}, case)
        yield Line(
            "sample top-k 20, top-p 0.95, against a maximum", {"rows": rows}, _sampling(on, rows)
        )


def _products(
    on: Setting, second: Setting, name: str, shape: tuple[int, int], rows: int
) -> Iterator[Line]:
    """Products with 4-bit and 8-bit weights, against torch's with plain weights."""
    for kind, way in (("int4", on), ("int4 fragments", second), ("int8", on), ("fp8", on)):
        if way is on or rows <= MAX_TILE_ROWS:
            product = drawn_product(way, kind.partition(" ")[0], shape)
            where = {"rows": rows, "out": shape[0], "in": shape[1]}
            yield Line(f"{kind} {name}", where, product.case(way, rows))


def _attentions(
    on: Setting, second: Setting, spec: AttentionSpec, inputs: KernelInputs
) -> Iterator[Line]:
    """Few queries over keys and values of each type, and a prompt."""
    for seqs in (1, 8):
        decode = seqs * [(inputs.decode_context, 1)]
        yield _attention(on, on.sizes.kv_dtype, decode, spec)
        for kv_dtype in CODES.values():
            yield _attention(on, kv_dtype, decode, spec)
            yield _attention(second, kv_dtype, decode, spec, " fragments")
    prompt = (inputs.prefill_tokens, inputs.prefill_tokens)
    yield _attention(on, on.sizes.kv_dtype, [prompt], spec)


def _attention(
    on: Setting,
    kv_dtype: torch.dtype,
    requests: list[tuple[int, int]],
    spec: AttentionSpec,
    way: str = "",
) -> Line:
    """Attention, against torch's over contiguous plain keys and values without caps or sinks."""
    on = replace(on, sizes=replace(on.sizes, kv_dtype=kv_dtype))
    seqs, (context, new), dim = len(requests), requests[0], spec.head_dim
    flat = on.values(seqs, spec.num_heads, new, dim)
    keys, values = (on.values(seqs, spec.num_kv_heads, context, dim) for _ in range(2))
    case = replace(
        attention(on, Piece.FEW_QUERIES if new == 1 else Piece.MANY_QUERIES, requests, spec),
        plain=lambda: F.scaled_dot_product_attention(
            flat, keys, values, is_causal=new > 1, enable_gqa=True
        ),
    )
    name = next((name for name, each in CODES.items() if each == kv_dtype), str(kv_dtype))
    stored = name.removeprefix("torch.") + way
    name = f"attention {'prefill' if new > 1 else 'decode'} {stored}"
    return Line(name, {"rows": seqs * new, "context": context}, case)


def _sampling(on: Setting, rows: int) -> OperatorCase:
    """Top-k and top-p over the whole vocabulary, against torch's argmax alone."""
    logits = torch.randn(rows, on.sizes.architecture.vocab_size, device=on.device)
    return replace(sampling(on, rows * [_FILTERS]), plain=lambda: logits.argmax(dim=-1))
