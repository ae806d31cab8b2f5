"""The bench of the kernels: its lines run, interpreted and small; its bytes by hand."""

from collections.abc import Callable

import pytest
import torch
from checkpoints import tiny_config
from guards import needs_interpreter

from localllm.bench.kernels import KernelInputs, kernel_lines, kernel_suite
from localllm.bench.operators import Clock
from localllm.cost.rates import Rates
from localllm.model.architecture import Architecture
from localllm.model.families.table import architecture_of

CPU = torch.device("cpu")
LIMITS = Rates(1e9, {"fp32": 1e9, "bf16": 1e9, "int8": 1e9})


INPUTS = KernelInputs(rows=(2,), decode_context=16, prefill_tokens=48)


@pytest.fixture
def architecture() -> Architecture:
    """Widths that are multiples of a group."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8}
    return architecture_of(tiny_config("LlamaForCausalLM", **sizes, num_key_value_heads=4))


@needs_interpreter
def test_every_case_runs_and_stands_beside_torch(architecture: Architecture) -> None:
    calls = []

    def timer(call: Callable[[], object]) -> float:
        if call not in calls:
            calls.append(call)
            call()
        return 2e-3 if len(calls) % 2 else 4e-3

    suite = kernel_suite(architecture, CPU, Clock(timer, 1, LIMITS), INPUTS)
    suite.run(lambda what: None)
    rows = suite.results()
    names = {row.test for row in rows}
    products = {f"{kind} {name}" for kind in ("int4", "int8", "fp8") for name in ("qkv", "output")}
    assert products <= names
    assert "attention prefill bfloat16" in names
    assert "attention decode int8" in names
    for row in rows:
        assert row.found["bytes_per_s"] > 0
        assert row.found["times_torch"].median > 0


def test_bytes_and_operations_by_hand(architecture: Architecture) -> None:
    heads, kv_heads, dim = 8, 4, 16
    costs = {
        (line.name, *line.conditions.values()): line.case.cost
        for line in kernel_lines(architecture, CPU, INPUTS)
    }
    # Of the product of queries, keys and values: half a byte a code, and two for the scale of a
    # group of 128; of the others a byte a code, and two or four for the scale of an output.
    out, width = (heads + 2 * kv_heads) * dim, 128
    activations = 2 * (width + out) * 2
    int4 = costs["int4 qkv", 2, out, width]
    assert int4.num_bytes == out * width // 2 + out * 2 + activations
    assert int4.operations == 2 * 2 * out * width
    assert costs["int4 fragments qkv", 2, out, width] == int4
    assert costs["int8 qkv", 2, out, width].num_bytes == out * width + 2 * out + activations
    assert costs["fp8 qkv", 2, out, width].num_bytes == out * width + 4 * out + activations
    decode = costs["attention decode int8", 8, 16]
    # Keys and values of 8 requests, each row with its scale; queries and results in two bytes.
    assert decode.num_bytes == 2 * 8 * 16 * kv_heads * (dim + 4) + 2 * 8 * heads * dim * 2
    assert decode.operations == 4 * heads * dim * 8 * 16
    prefill = costs["attention prefill bfloat16", 48, 48]
    assert prefill.operations == 4 * heads * dim * 48 * 49 // 2
    assert {cost.arithmetic for cost in (int4, decode, prefill)} == {"bf16"}
    norm, gate = costs["add_rms_norm", 16], costs["gate, silu", 16]
    assert (norm.num_bytes, norm.operations) == (4 * 16 * 128 * 2, 5 * 16 * 128)
    assert (gate.num_bytes, gate.operations) == (3 * 16 * 256 * 2, 5 * 16 * 256)
