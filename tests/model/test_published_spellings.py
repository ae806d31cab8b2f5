"""Fields as published files spell them, where a family has several ways."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from every_family import small_config
from safetensors.torch import load_file, save_file
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm

from localllm import LLM, SamplingParams
from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.families.table import architecture_of
from localllm.model.rope_config import NO_ROPE
from localllm_kernels import TORCH_OPS

SLIDING, FULL = "sliding_attention", "full_attention"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def attentions(family: str, **changes: Any) -> list[AttentionSpec]:
    """The attention of each layer."""
    return attentions_of(architecture_of({**small_config(family), **changes}))


def attentions_of(architecture: Architecture) -> list[AttentionSpec]:
    blocks = [place.block for layer in architecture.layers for place in layer.places]
    return [block for block in blocks if isinstance(block, AttentionSpec)]


def test_zeros_of_yarn_and_of_growing_queries_say_nothing() -> None:
    zeros = {**YARN, "mscale": 0, "mscale_all_dim": 0.0, "llama_4_scaling_beta": 0}
    [first, _] = attentions("Ministral3ForCausalLM", rope_parameters=zeros)
    assert first.scores.growth is None
    assert (first.rope.mscale, first.rope.mscale_all_dim) == (None, None)


def test_queries_of_ministral_grow_in_the_old_spelling_too() -> None:
    rope = {**YARN, "llama_4_scaling_beta": 0.1}
    new = attentions("Ministral3ForCausalLM", rope_parameters=rope)
    assert new == attentions("Ministral3ForCausalLM", rope_parameters=None, rope_scaling=rope)
    assert new[0].scores.growth is not None


def test_windows_of_smollm3_are_where_nothing_turns() -> None:
    asked = {"use_sliding_window": True, "sliding_window": 24, "no_rope_layers": [1, 0]}
    turned, still = attentions("SmolLM3ForCausalLM", **asked)
    assert (turned.window, still.window, still.rope) == (None, 24, NO_ROPE)
    turned, still = attentions("SmolLM3ForCausalLM", **asked, layer_types=[SLIDING, FULL])
    assert (turned.window, still.window) == (24, None)


def test_the_first_files_of_phi3_call_longrope_yarn() -> None:
    rope = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    expected = attentions("Phi3ForCausalLM", rope_scaling=rope)
    assert attentions("Phi3ForCausalLM", rope_scaling={**rope, "type": "yarn"}) == expected
    assert expected[0].rope.kind == "longrope"


def test_layers_of_cohere2_without_their_window_do_not_turn() -> None:
    found = attentions("Cohere2ForCausalLM", sliding_window=None)
    assert {(each.window, each.rope) for each in found} == {(None, NO_ROPE)}


def test_heads_of_a_layer_of_gemma4_stand_under_its_number() -> None:
    for number in ("1", "01"):
        own = {number: {"head_dim": 64}}
        first, second = attentions("Gemma4UnifiedForCausalLM", per_layer_config=own)
        assert (first.head_dim, second.head_dim) == (16, 64)
    own = {"0": {"head_dim": 32, "num_key_value_heads": 1}}
    first, _ = attentions("Gemma4UnifiedForCausalLM", per_layer_config=own)
    assert (first.head_dim, first.num_kv_heads) == (32, 1)


@pytest.mark.parametrize("older", ["silu", "gelu"])
def test_the_gate_of_gemma_is_hidden_activation(older: str) -> None:
    config = small_config("Gemma3ForCausalLM")
    other = architecture_of({**config, "hidden_act": older})
    assert other == architecture_of(config)


@pytest.mark.parametrize("family", ["Olmo2ForCausalLM", "Olmo3ForCausalLM"])
def test_norms_of_olmo_round_after_their_weight(family: str) -> None:
    architecture = architecture_of(small_config(family))
    norms = [
        norm for layer in architecture.layers for place in layer.places for norm in place.norms
    ]
    own = [block.norms.spec("n") for block in attentions_of(architecture) if block.norms]
    x, weight = torch.randn(500, 64).bfloat16(), (1 + torch.randn(64) / 3).bfloat16()
    for spec in {*norms, *own, architecture.norm}:
        oracle = Olmo2RMSNorm(64, eps=spec.eps).bfloat16()
        oracle.weight.data.copy_(weight)
        differ = spec.with_weight(weight)(x, TORCH_OPS) != oracle(x)
        assert differ.float().mean() < 0.002
        other = replace(spec, rounds_last=False).with_weight(weight)(x, TORCH_OPS)
        assert (other != oracle(x)).float().mean() > 0.1


@pytest.mark.parametrize(
    ("scale", "activations"),
    [("weight_scale_inv", "activation_scale"), ("weight_scale", "input_scale")],
)
def test_fp8_with_one_scale_for_a_linear(scale: str, activations: str, tmp_path: Path) -> None:
    """As Ministral 3 is published, and as other tools write it."""
    config = tiny_config("LlamaForCausalLM", torch_dtype="bfloat16")
    folder = write_checkpoint(tmp_path / "model", config)
    tensors, rounded = load_file(folder / "model.safetensors"), {}
    for name, tensor in list(tensors.items()):
        if name.endswith("proj.weight"):
            factor = tensor.float().abs().max() / 448
            codes = (tensor.float() / factor).to(torch.float8_e4m3fn)
            rounded[name] = codes.float() * factor
            linear = name.removesuffix(".weight")
            tensors |= {
                name: codes,
                f"{linear}.{scale}": factor,
                f"{linear}.{activations}": factor.clone(),
            }
    plain = write_checkpoint(tmp_path / "plain", config)
    of_plain = load_file(plain / "model.safetensors")
    save_file({**of_plain, **rounded}, plain / "model.safetensors", {"format": "pt"})
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantization = {
        "quant_method": "fp8",
        "activation_scheme": "static",
        "weight_block_size": None,
    }
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [
        LLM(str(each), max_num_seqs=1, dtype="float32").generate([[3, 4, 5, 6]], params)[0].text
        for each in (folder, plain)
    ]
    assert texts[0] == texts[1]
