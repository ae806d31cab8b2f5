"""What a step must move and compute, against counts done by hand."""

import pytest
import torch
from checkpoints import tiny_config

from localllm.cost.rates import ModelWork, Rates, Roofline, measure_rates
from localllm.model.families.table import architecture_of

# By hand, for tiny_config: a layer's linears are q 64x48, k and v 32x48 each, o 48x64, gate and up
# 80x48 each, down 48x80.
LAYER_WEIGHTS = 3072 + 2 * 1536 + 3072 + 3 * 3840
HEAD_WEIGHTS = 288 * 48


def tiny_work(architecture: str = "LlamaForCausalLM", **changes: int) -> ModelWork:
    model = architecture_of(tiny_config(architecture, **changes))

    def bfloat16_bytes(linear: str) -> int:
        if linear == "lm_head":
            return 2 * HEAD_WEIGHTS
        name = linear.rpartition(".")[2]
        widths = {"q_proj": 3072, "k_proj": 1536, "v_proj": 1536, "o_proj": 3072}
        return 2 * widths.get(name, 3840)

    return ModelWork.of(model, bfloat16_bytes, row_bytes=lambda width: 2 * width)


def test_weights_are_counted_once_with_the_head_in_the_bytes_alone() -> None:
    work = tiny_work()
    assert LAYER_WEIGHTS == 20736
    assert work.num_weights == 2 * 20736
    assert work.weight_bytes(1) == 2 * (2 * 20736 + 13824)


def test_a_decode_step_reads_all_weights_and_every_key_and_value() -> None:
    # A token has 2 heads of 16 keys and as many values, 2 bytes each: 128 bytes a layer.
    assert tiny_work().decode_bytes([10, 5]) == 110_592 + 128 * 15 * 2


def test_a_decode_step_multiplies_every_weight_with_every_request() -> None:
    # And 4 heads of 16: a product and a sum for the score, the same for the value.
    products = 2 * (2 * 20736 + 13824) * 2
    assert tiny_work().decode_operations([10, 5]) == products + 4 * 4 * 16 * 15 * 2


def test_prefill_is_causal_and_computes_the_head_once() -> None:
    # Tokens 5, 6 and 7 look at 5, 6 and 7 tokens, in two layers.
    expected = 2 * 2 * 20736 * 3 + 4 * 4 * 16 * (5 + 6 + 7) * 2 + 2 * 13824
    assert tiny_work().prefill_operations(3, depth=4) == expected


def test_a_sliding_window_bounds_what_is_looked_at() -> None:
    work = tiny_work("MistralForCausalLM", sliding_window=4)
    assert work.decode_bytes([10, 3]) == 110_592 + 128 * (4 + 3) * 2
    whole = tiny_work().prefill_operations(3, depth=4)
    assert whole - work.prefill_operations(3, depth=4) == 4 * 4 * 16 * (1 + 2 + 3) * 2


def test_the_roofline_is_the_slower_of_moving_and_computing() -> None:
    limits = Rates(100.0, {"fp32": 10.0, "bf16": 50.0, "int8": 200.0})
    moving = Roofline.of(1000, 400, limits, "bf16")
    assert (moving.seconds, moving.bound) == (10.0, "memory")
    computing = Roofline.of(1000, 400, limits, "fp32")
    assert (computing.seconds, computing.bound) == (40.0, "arithmetic")
    assert moving.verdict(20.0) == "50% of the memory bandwidth"
    assert moving.verdict(9.0) == "faster than memory bandwidth: fed by the caches"
    assert computing.verdict(50.0) == "80% of the arithmetic peak"


def test_a_peak_is_that_of_the_best_product_that_holds_the_values() -> None:
    without_int8 = Rates(1.0, {"fp32": 100.0, "bf16": 40.0, "int8": 2.0})
    assert [without_int8.peak(each) for each in ("int8", "bf16", "fp32")] == [100.0, 100.0, 100.0]
    with_int8 = Rates(1.0, {"fp32": 10.0, "bf16": 50.0, "int8": 200.0})
    assert [with_int8.peak(each) for each in ("int8", "bf16", "fp32")] == [200.0, 50.0, 10.0]
    assert Rates(1.0, {"int8": 2.0}).peak("bf16") is None


def test_the_median_of_limits_is_taken_rate_by_rate() -> None:
    several = [Rates(m, {"bf16": b}) for m, b in ((1.0, 30.0), (3.0, 10.0), (2.0, 20.0))]
    assert Rates.median(several) == Rates(2.0, {"bf16": 20.0})


def test_measured_rates_are_those_of_a_machine() -> None:
    limits = measure_rates(torch.device("cpu"))
    assert 1e9 < limits.memory_bytes_per_s < 1e12
    assert all(1e9 < rate < 1e14 for rate in limits.operations_per_s.values())


def test_a_product_that_a_device_does_not_have_costs_its_figure_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling cublasLtMatmul")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    limits = measure_rates(torch.device("cpu"))
    assert set(limits.operations_per_s) == {"fp32", "bf16"}
    assert Roofline.of(1000, 400, limits, "int8").bound == "memory"
    assert Rates.median([limits, Rates(1.0, {"int8": 1.0})]).operations_per_s == {}


def test_the_second_matrix_of_the_product_in_8_bits_is_in_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """cuBLASLt refuses it in rows on many GPUs (PyTorch #169956)."""
    strides = []
    product = torch._int_mm

    def noted(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        strides.append(b.stride(0))
        return product(a, b)

    monkeypatch.setattr(torch, "_int_mm", noted)
    measure_rates(torch.device("cpu"))
    assert set(strides) == {1}
