"""One small config of every family, with what sets the family apart in it."""

from typing import Any

import pytest
from checkpoints import tiny_config

from localllm.model.families.table import architecture_of

SLIDING, FULL = "sliding_attention", "full_attention"
_TWO_KINDS: dict[str, Any] = {"sliding_window": 24, "layer_types": [SLIDING, FULL]}
_SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL] * 2,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 288,
}
_EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
WITH_EXPERTS: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {**_EXPERTS, "num_local_experts": 6, "sliding_window": 24},
    "Qwen2MoeForCausalLM": {**_EXPERTS, "shared_expert_intermediate_size": 96},
    "Qwen3MoeForCausalLM": {**_EXPERTS, "norm_topk_prob": True},
    "OlmoeForCausalLM": _EXPERTS,
    "GptOssForCausalLM": {**_EXPERTS, "num_local_experts": 6, "sliding_window": 24},
    "GraniteMoeForCausalLM": {
        **_EXPERTS,
        "num_local_experts": 6,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "Glm4MoeForCausalLM": {
        **_EXPERTS,
        "n_routed_experts": 12,
        "n_group": 3,
        "topk_group": 1,
        "routed_scaling_factor": 1.7,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
}
WITH_EXPERTS["Lfm2MoeForCausalLM"] = {
    **_EXPERTS,
    "model_type": "lfm2_moe",
    "head_dim": None,
    "num_experts": 6,
    "num_dense_layers": 1,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_hidden_layers": 3,
}
_LATENT: dict[str, Any] = {
    **_EXPERTS,
    "head_dim": None,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 3,
    "topk_group": 1,
    "routed_scaling_factor": 1.7,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
WITH_EXPERTS["DeepseekV2ForCausalLM"] = {
    **_LATENT,
    "model_type": "deepseek_v2",
    "n_group": None,
    "topk_group": None,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
WITH_EXPERTS["DeepseekV3ForCausalLM"] = {
    **_LATENT,
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 1,
}
WITH_EXPERTS["Glm4MoeLiteForCausalLM"] = {
    **_LATENT,
    "model_type": "glm4_moe_lite",
    "rope_interleave": False,
}
_DELTA_NET: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_hidden_layers": 3,
}
_BESIDE = {**_EXPERTS, **_DELTA_NET, "num_experts": 6, "shared_expert_intermediate_size": 96}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 4,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_hidden_layers": 3,
}
WITH_EXPERTS["NemotronHForCausalLM"] = {
    "model_type": "nemotron_h",
    "layers_block_type": ["mamba", "moe", "attention", "mlp", "mamba"],
    "num_hidden_layers": 5,
    "head_dim": 16,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 24,
    "n_groups": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "moe_latent_size": 32,
    "moe_shared_expert_intermediate_size": 96,
    "routed_scaling_factor": 1.7,
    "hidden_act": None,
}
WITH_EXPERTS["Qwen3NextForCausalLM"] = {**_BESIDE, "model_type": "qwen3_next"}
WITH_EXPERTS["Qwen3_5MoeForCausalLM"] = {**_BESIDE, "model_type": "qwen3_5_moe_text"}
EVERY_FAMILY: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 24},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
    "Qwen3_5ForCausalLM": {**_DELTA_NET, "model_type": "qwen3_5_text"},
    "Cohere2ForCausalLM": {**_TWO_KINDS, "layer_norm_eps": 1e-5, "logit_scale": 0.5},
    "Ernie4_5ForCausalLM": {"use_bias": True},
    "Exaone4ForCausalLM": _TWO_KINDS,
    "Gemma2ForCausalLM": {
        **_TWO_KINDS,
        "hidden_act": None,
        "query_pre_attn_scalar": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "Gemma3ForCausalLM": {**_TWO_KINDS, "hidden_act": None, "query_pre_attn_scalar": 20},
    "Gemma4ForCausalLM": {
        **_TWO_KINDS,
        **_SHARED_KEYS,
        "hidden_act": None,
        "global_head_dim": 32,
        "tie_word_embeddings": True,
    },
    "Gemma4UnifiedForCausalLM": {
        **_TWO_KINDS,
        "hidden_act": None,
        "global_head_dim": 32,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "tie_word_embeddings": True,
    },
    "Glm4ForCausalLM": {"partial_rotary_factor": 0.5, "attention_bias": True},
    "GraniteForCausalLM": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
    },
    "GraniteMoeHybridForCausalLM": {
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.4,
        "attention_multiplier": 0.3,
        "logits_scaling": 3.0,
        "shared_intermediate_size": 96,
        "num_local_experts": 0,
        "position_embedding_type": "rope",
        **_MAMBA,
    },
    "HunYuanDenseV1ForCausalLM": {},
    "Lfm2ForCausalLM": {
        "head_dim": None,
        "norm_eps": 1e-5,
        "rms_norm_eps": None,
        "conv_bias": True,
        "block_auto_adjust_ff_dim": False,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_hidden_layers": 3,
    },
    "Lfm3ForCausalLM": {
        "pad_token_id": 0,
        "layer_types": ["conv", "sliding_attention", "full_attention"],
        "num_hidden_layers": 3,
        "sliding_window": 24,
        "rope_theta": None,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 100000.0,
            },
        },
    },
    "Ministral3ForCausalLM": {
        "rope_theta": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "rope_theta": 10000.0,
            "llama_4_scaling_beta": 0.1,
            "original_max_position_embeddings": 32,
            "beta_fast": 4.0,
            "truncate": False,
        },
    },
    "Olmo2ForCausalLM": {},
    "OlmoHybridForCausalLM": {
        **_DELTA_NET,
        "model_type": "olmo_hybrid",
        "pad_token_id": 0,
        "partial_rotary_factor": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": None},
    },
    "Olmo3ForCausalLM": _TWO_KINDS,
    "Phi3ForCausalLM": {"head_dim": None},
    "SeedOssForCausalLM": {"attention_bias": True},
    "SmolLM3ForCausalLM": {"no_rope_layers": [1, 0]},
    **WITH_EXPERTS,
    # A class with a second kind of block: its name, a comma, and what is different.
    "Gemma4ForCausalLM, experts": {
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 24,
        "head_dim": 16,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
}


def class_of(family: str) -> str:
    """The class of a row of the table."""
    return family.partition(",")[0]


def firsts_of_their_kind() -> set[str]:
    """Families with blocks of a kind that no family before them has, one for each kind."""
    seen, found = set[type](), set[str]()
    for family in EVERY_FAMILY:
        layers = architecture_of(small_config(family)).layers
        kinds = {type(place.block) for layer in layers for place in layer.places}
        if kinds - seen:
            seen |= kinds
            found.add(family)
    return found


def by_kind() -> list[Any]:
    """Every family as a parameter, with those slow whose blocks are of kinds seen before."""
    firsts = firsts_of_their_kind()
    return [
        pytest.param(each, marks=[] if each in firsts else pytest.mark.slow)
        for each in EVERY_FAMILY
    ]


def small_config(family: str) -> dict[str, Any]:
    """Its config.json."""
    changes = {"hidden_size": 64, "intermediate_size": 96, **EVERY_FAMILY[family]}
    config = tiny_config(class_of(family), **changes)
    return {name: value for name, value in config.items() if value is not None}
