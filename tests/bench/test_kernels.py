"""The bench of the kernels: its cases run, interpreted and small; its bytes by hand."""

from collections.abc import Callable

import pytest
import torch
from checkpoints import tiny_config
from guards import needs_interpreter

from localllm.bench import kernels
from localllm.bench.kernels import KernelCases, KernelSuite
from localllm.cost.rates import Rates
from localllm.model.architecture import Architecture
from localllm.model.families.table import architecture_of

CPU = torch.device("cpu")
LIMITS = Rates(1e9, {"fp32": 1e9, "bf16": 1e9, "int8": 1e9})


@pytest.fixture
def architecture(monkeypatch: pytest.MonkeyPatch) -> Architecture:
    """Widths that are multiples of a group; few rows and short contexts."""
    monkeypatch.setattr(kernels, "ROWS", (2,))
    monkeypatch.setattr(kernels, "DECODE_CONTEXT", 16)
    monkeypatch.setattr(kernels, "PREFILL_TOKENS", 48)
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

    suite = KernelSuite(architecture, CPU, 1, timer, LIMITS)
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
    cases = KernelCases(architecture, CPU)
    int4, fragments, int8, _ = cases.product_cases("x", 256, 128, rows=2)
    activations = 2 * (128 + 256) * 2
    # Half a byte a code, and two for the scale of a group of 128.
    assert int4.num_bytes == 256 * 128 // 2 + 256 * 2 + activations
    assert fragments.num_bytes == int4.num_bytes
    assert int8.num_bytes == 256 * 128 + activations
    assert int4.operations == 2 * 2 * 256 * 128
    [sizes] = cases.attentions()
    decode = cases.attention(sizes, 3, 32, 1, torch.int8)
    head_dim = sizes.head_dim
    keys_and_values = 2 * 3 * 32 * 4 * (head_dim + 4)
    assert decode.num_bytes == keys_and_values + 2 * 3 * 8 * head_dim * 2
    assert decode.operations == 4 * 8 * head_dim * 3 * 32
    prefill = cases.attention(sizes, 1, 48, 48, torch.bfloat16)
    assert prefill.operations == 4 * 8 * head_dim * 48 * 49 // 2
