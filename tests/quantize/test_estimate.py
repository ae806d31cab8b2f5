"""The time that `quantize` foretells, beside what it took on one machine."""

from typing import Any

import pytest
from checkpoints import architecture_of, tiny_config

from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.estimate import Rates, stage_seconds
from localllm.quantize.recipe import Recipe

# Two cores of an AMD EPYC (Zen 4), 2026-11-29, nothing else at work.
RATES = Rates(exact=185e9, rounded=402e9)
QWEN: dict[str, Any] = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 151936,
}
SMOLLM2: dict[str, Any] = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
}


@pytest.mark.parametrize(
    ("config", "group_size", "measured"),
    [
        (QWEN, 128, {"calibration text": 83, "layers": 324, "measuring": 57}),
        (SMOLLM2, 64, {"calibration text": 30, "layers": 84, "measuring": 20}),
    ],
    ids=["Qwen2.5-Coder 0.5B", "SmolLM2 135M"],
)
def test_a_copy_in_4_bits_takes_as_long_as_foretold(
    config: dict[str, Any], group_size: int, measured: dict[str, float]
) -> None:
    architecture = architecture_of(tiny_config("Qwen2ForCausalLM", **config))
    recipe = Recipe("gptq", group_size, embedding="int8", head="int8")
    calibration = CalibrationRequest(num_windows=32)
    told = stage_seconds(architecture, recipe, calibration, RATES, verify=True)
    named, whole = told.named(), sum(measured.values())
    assert told.total == pytest.approx(whole, rel=0.1)
    for stage, seconds in measured.items():
        assert named[stage] == pytest.approx(seconds, abs=0.05 * whole)
