"""The table of families: for each of GGUF's architectures, its class, and what its keys and names
mean beyond what all have in common.

Source: `conversion/*.py` and `gguf-py/gguf/constants.py` of llama.cpp, and the classes of
transformers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.model.gguf.keys import GgufKeys

Fields = dict[str, Any]


def _nothing(keys: GgufKeys) -> Fields:
    return {}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """An architecture of GGUF.

    `model_class`: the class of transformers that computes the same; `config`: the fields of its
    config.json beyond those that all share; `names`: the loader's names of a layer's tensors, by
    GGUF's, where they are not the usual ones, "{}" for the number of an expert; `is_paired`: in
    queries and keys the two values that turn together stand side by side, though the class has
    them half a head apart; `has_raised_norms`: the weights of norms are stored plus 1.
    """

    model_class: str
    config: Callable[[GgufKeys], Fields] = _nothing
    names: Mapping[str, str] = field(default_factory=dict)
    is_paired: bool = False
    has_raised_norms: bool = False


# Names of a layer's tensors that most families share, without "blk.N." and "model.layers.N.".
USUAL = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
}
_AROUND = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BEHIND = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_WHOLE = {"ffn_up": "mlp.gate_up_proj"}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def _experts(keys: GgufKeys) -> Fields:
    return {
        "num_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer(
            "expert_feed_forward_length", keys.integer("feed_forward_length", 0)
        ),
    }


def _mixtral(keys: GgufKeys) -> Fields:
    return {
        "num_local_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def _llama(keys: GgufKeys) -> Fields:
    tensors = keys.header.tensors
    keys.integer("expert_count", 0), keys.integer("expert_used_count", 0)
    return {
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }


def _qwen2_moe(keys: GgufKeys) -> Fields:
    shared = keys.integer("expert_shared_feed_forward_length")
    return {**_experts(keys), "shared_expert_intermediate_size": shared, "norm_topk_prob": False}


def _qwen3_moe(keys: GgufKeys) -> Fields:
    return {**_experts(keys), "norm_topk_prob": True}


def _gemma2(keys: GgufKeys) -> Fields:
    layers, head_dim = keys.integer("block_count"), keys.integer("attention.key_length", 256)
    heads, width = keys.integer("attention.head_count"), keys.integer("embedding_length")
    return {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        # Of the model with 27 billion parameters alone: the width of a head if all had equal parts.
        "query_pre_attn_scalar": width // heads if layers == 46 else head_dim,
        "layer_types": [_FULL if i % 2 else _SLIDING for i in range(layers)],
    }


def _gemma3(keys: GgufKeys) -> Fields:
    layers, head_dim = keys.integer("block_count"), keys.integer("attention.key_length", 256)
    heads, width = keys.integer("attention.head_count"), keys.integer("embedding_length")
    cap = keys.number("final_logit_softcapping", 0.0)
    return {
        "query_pre_attn_scalar": width // heads if layers == 62 else head_dim,
        "final_logit_softcapping": cap or None,
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "layer_types": [_SLIDING if (i + 1) % 6 else _FULL for i in range(layers)],
    }


def _olmo(keys: GgufKeys) -> Fields:
    if "attention.sliding_window_pattern" not in keys:
        return {}
    layers = keys.integer("block_count")
    pattern = keys.by_layer("attention.sliding_window_pattern", layers)
    return {"layer_types": [_SLIDING if each else _FULL for each in pattern]}


def _smollm3(keys: GgufKeys) -> Fields:
    return {"no_rope_layer_interval": 4}


def _granite(keys: GgufKeys) -> Fields:
    return {
        "attention_multiplier": keys.number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def _glm4(keys: GgufKeys) -> Fields:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.header.tensors}


def _cohere2(keys: GgufKeys) -> Fields:
    return {
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
        "sliding_window_pattern": 4,
    }


def _mistral3(keys: GgufKeys) -> Fields:
    beta = keys.number("attention.temperature_scale", 0.0)
    return {"gguf_query_growth": beta}


GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", _llama, is_paired=True),
    "mixtral": GgufFamily(
        "MixtralForCausalLM",
        _mixtral,
        {
            "ffn_gate_inp": "block_sparse_moe.gate",
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        is_paired=True,
    ),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen2moe": GgufFamily("Qwen2MoeForCausalLM", _qwen2_moe),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM", _qwen3_moe),
    "gemma2": GgufFamily("Gemma2ForCausalLM", _gemma2, _AROUND, has_raised_norms=True),
    "gemma3": GgufFamily("Gemma3ForCausalLM", _gemma3, _AROUND, has_raised_norms=True),
    "phi3": GgufFamily("Phi3ForCausalLM", names=_WHOLE),
    "olmo2": GgufFamily("Olmo2ForCausalLM", _olmo, _BEHIND),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", _smollm3, is_paired=True),
    "granite": GgufFamily("GraniteForCausalLM", _granite, is_paired=True),
    "glm4": GgufFamily(
        "Glm4ForCausalLM",
        _glm4,
        {
            "post_attention_norm": "post_self_attn_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
            **_WHOLE,
        },
    ),
    "cohere2": GgufFamily("Cohere2ForCausalLM", _cohere2),
}


def family_of(keys: GgufKeys) -> GgufFamily | None:
    """The family of a file; None if it is not known."""
    name = keys.architecture
    if name == "llama" and keys.integer("expert_count", 0) > 0:
        name = "mixtral"  # the converter calls both Llama
    found = GGUF_FAMILIES.get(name)
    if name == "olmo2" and found is not None and "attention.sliding_window" in keys:
        return GgufFamily("Olmo3ForCausalLM", found.config, found.names)
    return found
