"""The predicted step, from sizes worked out by hand."""

import pytest
from checkpoints import tiny_config

from localllm.cost.rates import ModelWork
from localllm.cost.step_model import Care, Gpu, predict_decode
from localllm.model.families.table import architecture_of

MODEL = architecture_of(tiny_config("LlamaForCausalLM"))
CARE = Care(plain=0.5, quantized=0.25, attention=1.0, launch_s=1e-3)


def test_kernels_move_their_bytes_and_launches_cost_the_same_each() -> None:
    work = ModelWork.of(MODEL, lambda linear: 1000, row_bytes=lambda width: 32)
    gpu = Gpu("slow memory", 1000.0, 1e30)
    step = predict_decode(work, lambda linear: 1000, gpu, CARE, is_fused=True, batch=2, context=10)
    layers = MODEL.num_layers
    # A thousand bytes a linear, at a quarter of a thousand a second.
    assert step.kernels["qkv"] == pytest.approx(layers * 3 * 4)
    assert step.kernels["down"] == pytest.approx(layers * 4)
    assert step.kernels["head"] == pytest.approx(4)
    kv_bytes = 2 * layers * 2 * 2 * 32 * 10
    assert step.kernels["attention"] == pytest.approx(kv_bytes / 1000)
    assert step.launches == layers * 6 + 9
    assert step.seconds == pytest.approx(sum(step.kernels.values()) + step.launches * 1e-3)


def test_instructions_that_were_counted_bound_a_product() -> None:
    work = ModelWork.of(MODEL, lambda linear: 1000, row_bytes=lambda width: 32)
    gpu = Gpu("slow issue", 1000.0, 1e30, issue_per_s=100.0)
    care = Care(plain=0.5, quantized=0.25, attention=1.0, launch_s=0.0, issue=0.5)
    num_weights = 48 * 80
    step, quick = (
        predict_decode(
            work, lambda linear: 1000, gpu, care, is_fused=True, batch=1, context=1,
            instructions={"down": each},
        )
        for each in (3.0, 1e-9)
    )  # fmt: skip
    assert step.kernels["down"] == pytest.approx(MODEL.num_layers * 3 * num_weights / 50)
    # Where the instructions are few, memory at the share of plain weights.
    assert quick.kernels["down"] == pytest.approx(MODEL.num_layers * 2)
    assert quick.kernels["output"] == pytest.approx(MODEL.num_layers * 4)


def test_plain_weights_take_more_launches_and_arithmetic_counts_by_the_batch() -> None:
    shapes = {"model.layers.0.mlp.down_proj": 48 * 80}
    num_weights = shapes["model.layers.0.mlp.down_proj"]

    def stored(linear: str) -> int:
        return 2 * num_weights if linear.endswith("down_proj") else 10

    work = ModelWork.of(MODEL, stored, row_bytes=lambda width: 32)
    gpu = Gpu("slow arithmetic", 1e30, 1000.0)
    one, four = (
        predict_decode(work, stored, gpu, CARE, is_fused=False, batch=batch, context=1)
        for batch in (1, 4)
    )
    assert one.kernels["down"] == pytest.approx(MODEL.num_layers * 2 * num_weights / 500)
    assert four.kernels["down"] == pytest.approx(4 * one.kernels["down"])
    assert one.launches == MODEL.num_layers * 9 + 9
