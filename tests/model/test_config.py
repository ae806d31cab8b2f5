"""Configs are read in both spellings and refused with the field and its range."""

import math
from typing import Any

import pytest
from checkpoints import tiny_config

from localllm.engine.config import EngineConfig
from localllm.errors import CheckpointError, ExitCode, RequestError
from localllm.model.families.table import architecture_of
from localllm.schedule.sampling_params import SamplingParams

# Fields that only some families read.
READERS = {
    "sliding_window": "MistralForCausalLM",
    "use_sliding_window": "Qwen2ForCausalLM",
    "max_window_layers": "Qwen2ForCausalLM",
    "layer_types": "Qwen3ForCausalLM",
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_attention_heads", 0),
        ("num_attention_heads", -4),
        ("num_attention_heads", 10**9),
        ("num_attention_heads", "4"),
        ("num_attention_heads", True),
        ("num_attention_heads", 4.0),
        ("num_key_value_heads", 3),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", 10**6),
        ("hidden_size", None),
        ("vocab_size", -1),
        ("vocab_size", 1 << 40),
        ("head_dim", 15),
        ("intermediate_size", []),
        ("max_position_embeddings", 0),
        ("rms_norm_eps", math.nan),
        ("rms_norm_eps", -1e-6),
        ("rope_theta", 0),
        ("rope_theta", math.inf),
        ("sliding_window", 0),
        ("hidden_act", "relu"),
        ("torch_dtype", "int8"),
        ("tie_word_embeddings", "no"),
        ("rope_scaling", 7),
        ("rope_scaling", {"rope_type": "mystery", "factor": 2}),
        ("rope_scaling", {"rope_type": "linear"}),
        ("rope_scaling", {"rope_type": "linear", "factor": -2}),
        ("rope_scaling", {"rope_type": "default", "partial_rotary_factor": 1.5}),
        ("layer_types", ["full_attention"]),
        ("architectures", []),
        ("layer_types", [{}, {}]),
        pytest.param("rms_norm_eps", 10**400, id="eps of 401 digits"),
        pytest.param("vocab_size", 10**5000, id="vocab_size of 5,001 digits"),
        ("partial_rotary_factor", [{}]),
        ("rope_theta", 1e-320),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0, "beta_fast": 1e-320}),
        ("architectures", "LlamaForCausalLM"),
    ],
)
def test_an_absurd_value_is_refused_by_name(field: str, value: Any) -> None:
    config = tiny_config(READERS.get(field, "LlamaForCausalLM"), **{field: value})
    with pytest.raises(CheckpointError) as caught:
        architecture_of(config)
    assert caught.value.exit_code == ExitCode.CHECKPOINT
    named = f"{caught.value.message} {caught.value.where}"
    assert field.removeprefix("rope_") in named or "factor" in named or "rope" in named


def test_old_and_new_spelling_give_the_same_config() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = tiny_config("LlamaForCausalLM", rope_theta=5e5, rope_scaling=scaling)
    new = tiny_config("LlamaForCausalLM", rope_parameters={**scaling, "rope_theta": 5e5})
    del new["rope_theta"]
    new["dtype"] = new.pop("torch_dtype")
    assert architecture_of(old) == architecture_of(new)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 2.5),
        ("min_p", -0.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("logprobs", -1),
        ("n", 0),
        ("n", 9),
        ("seed", 1 << 70),
        ("seed", 1.5),
        pytest.param("seed", 10**5000, id="seed of 5,001 digits"),
        ("stop", None),
        ("stop_token_ids", None),
        ("logit_bias", [1]),
        ("stop", ("",)),
        ("stop", ("x",) * 65),
        ("stop", ("x" * 257,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", tuple(range(65))),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {1: math.inf}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", dict.fromkeys(range(1025), 1.0)),
    ],
)
def test_a_sampling_parameter_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{field: value})
    assert caught.value.param == field
    assert field in caught.value.message
    assert caught.value.exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_model_len", 0),
        ("block_size", 0),
        ("max_num_seqs", -1),
        ("max_num_batched_tokens", 0),
        ("gpu_memory_utilization", 1.5),
        ("device", "tpu"),
        ("dtype", "int4"),
        ("backend", "cuda"),
    ],
)
def test_an_engine_option_out_of_range_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(RequestError) as caught:
        EngineConfig(**{field: value})
    assert caught.value.param == field


def test_a_refusal_shows_the_value() -> None:
    with pytest.raises(RequestError, match="found -1"):
        SamplingParams(top_k=-1)
    with pytest.raises(CheckpointError, match="found 'four'"):
        architecture_of(tiny_config("LlamaForCausalLM", num_attention_heads="four"))


def test_a_lone_stop_string_is_one_stop() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
