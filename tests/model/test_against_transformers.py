"""Logits and greedy text equal transformers' on random checkpoints of every architecture."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from every_family import EVERY_FAMILY
from oracle import logprobs_of, record_logits
from transformers import AutoModelForCausalLM

from localllm import LLM, SamplingParams
from localllm.drafting.speculation_config import SpeculationConfig

# Float32 sums in another order; the models are two layers of width 48.
MAX_LOGPROB_DIFFERENCE = 1e-4
NUM_GREEDY_TOKENS = 48
# A field that config.json says is null; None leaves a field out.
NULL = "null"
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

GRANITE = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 3.0,
}
EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 40,
    "pad_token_id": 0,
}
GLM4_MOE = {
    **EXPERTS,
    "model_type": "glm4_moe",
    "n_routed_experts": 6,
    "partial_rotary_factor": 0.5,
    "first_k_dense_replace": 1,
}
LATENT: dict[str, Any] = {
    **EXPERTS,
    "head_dim": None,
    "num_key_value_heads": 4,
    "n_routed_experts": 6,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 20,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
DEEPSEEK_V2 = {
    **LATENT,
    "model_type": "deepseek_v2",
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.3,
    "first_k_dense_replace": 1,
}
DEEPSEEK_V3 = {
    **LATENT,
    "model_type": "deepseek_v3",
    "n_group": 3,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
GLM4_MOE_LITE = {**LATENT, "model_type": "glm4_moe_lite", "mlp_layer_types": ["dense", "sparse"]}
LFM2: dict[str, Any] = {
    "head_dim": None,
    "rms_norm_eps": None,
    "norm_eps": 1e-5,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "block_auto_adjust_ff_dim": False,
}
LFM2_MOE = {
    **LFM2,
    "model_type": "lfm2_moe",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "num_dense_layers": 1,
    "routed_scaling_factor": 1.5,
}
LFM3 = {
    **EVERY_FAMILY["Lfm3ForCausalLM"],
    "pad_token_id": 0,
    "rms_norm_eps": None,
    "norm_eps": 1e-5,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
}
GRANITE4 = {
    **GRANITE,
    "model_type": "granitemoehybrid",
    "head_dim": 12,
    "shared_intermediate_size": 80,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "mamba_n_heads": 4,
    "layer_types": ["attention"] * 2,
    "position_embedding_type": "rope",
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "layer_types": ["mamba", "attention", "mamba"],
    "num_hidden_layers": 3,
}
COHERE2 = {
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.5,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "hidden_size": 64,
    "head_dim": None,
}
GEMMA2 = {
    "hidden_act": None,
    "sliding_window": 24,
    "query_pre_attn_scalar": 20,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 3.0,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "hidden_act": None,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 20,
}
GEMMA4 = {
    "model_type": "gemma4_text",
    "hidden_act": None,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "tie_word_embeddings": True,
}
PHI3 = {"pad_token_id": 0}


def longrope(original: int, pairs: int = 8) -> dict[str, Any]:
    """Rotation with factors for each pair, short and long."""
    return {
        "original_max_position_embeddings": original,
        "rope_scaling": {
            "type": "longrope",
            "short_factor": [1 + 0.1 * i for i in range(pairs)],
            "long_factor": [2 + 0.7 * i for i in range(pairs)],
        },
    }


HUNYUAN = {"model_type": "hunyuan_v1_dense"}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "llama, heads times head_dim is the hidden size": (
        "LlamaForCausalLM",
        {"hidden_size": 64, "head_dim": None},
    ),
    "llama, as many kv heads": ("LlamaForCausalLM", {"num_key_value_heads": 4}),
    "llama, one kv head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "llama, kv heads left out": ("LlamaForCausalLM", {"num_key_value_heads": None}),
    "llama, biased": ("LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "llama, 3 heads of 20": (
        "LlamaForCausalLM",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 20},
    ),
    "llama, linear rope, old spelling": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ),
    "llama, dynamic rope, within the context": (
        "LlamaForCausalLM",
        {"rope_scaling": {"type": "dynamic", "factor": 4.0}},
    ),
    "llama, llama3 rope, old spelling": ("LlamaForCausalLM", {"rope_scaling": LLAMA3}),
    "llama, llama3 rope, new spelling": (
        "LlamaForCausalLM",
        {
            "rope_theta": None,
            "rope_parameters": {**LLAMA3, "rope_theta": 500000.0},
            "torch_dtype": None,
            "dtype": "float32",
        },
    ),
    "llama, yarn": ("LlamaForCausalLM", {"rope_scaling": YARN}),
    "llama, yarn with its options": (
        "LlamaForCausalLM",
        {
            "rope_scaling": {
                **YARN,
                "beta_fast": 16.0,
                "beta_slow": 2.0,
                "truncate": False,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
            }
        },
    ),
    "llama, head larger than the tokenizer": ("LlamaForCausalLM", {"vocab_size": 333}),
    "mistral, no window": ("MistralForCausalLM", {}),
    "mistral, window shorter than the prompt": ("MistralForCausalLM", {"sliding_window": 24}),
    "mistral, window of one": ("MistralForCausalLM", {"sliding_window": 1}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2, tied": ("Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    "qwen2, window from layer 1 on": (
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen2, window not in use": ("Qwen2ForCausalLM", {"sliding_window": 8}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3, biased, one kv head, tied, yarn": (
        "Qwen3ForCausalLM",
        {
            "attention_bias": True,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_scaling": YARN,
        },
    ),
    "qwen3, layer types": (
        "Qwen3ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "smollm3, the second layer without rope": (
        "SmolLM3ForCausalLM",
        {"no_rope_layers": [1, 0], "pad_token_id": 0},
    ),
    "olmo2, biased": ("Olmo2ForCausalLM", {"attention_bias": True}),
    "olmo3, yarn in the full layer alone": (
        "Olmo3ForCausalLM",
        {
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 24,
            # As published; transformers 5.23 gives windowed layers no other base.
            "rope_theta": 500000.0,
            "rope_scaling": {**YARN, "attention_factor": 1.2},
        },
    ),
    "lfm2": ("Lfm2ForCausalLM", LFM2),
    "lfm2, biased, four taps, adjusted inner size": (
        "Lfm2ForCausalLM",
        {
            **LFM2,
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 24,
            "block_ffn_dim_multiplier": 1.5,
            "layer_types": ["conv", "full_attention", "full_attention", "conv"],
        },
    ),
    "lfm2, experts": ("Lfm2MoeForCausalLM", LFM2_MOE),
    "lfm2, experts, no bias, factors as they are": (
        "Lfm2MoeForCausalLM",
        {**LFM2_MOE, "use_expert_bias": False, "norm_topk_prob": False, "num_dense_layers": 0},
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", EVERY_FAMILY["Qwen3_5ForCausalLM"]),
    "qwen3.5, experts": ("Qwen3_5MoeForCausalLM", EVERY_FAMILY["Qwen3_5MoeForCausalLM"]),
    "qwen3-next": ("Qwen3NextForCausalLM", EVERY_FAMILY["Qwen3NextForCausalLM"]),
    "lfm3": ("Lfm3ForCausalLM", LFM3),
    "lfm3, biased, no gates, no norms after": (
        "Lfm3ForCausalLM",
        {
            **LFM3,
            "attention_bias": True,
            "conv_bias": True,
            "use_attention_gate": False,
            "use_sandwich_norm": False,
        },
    ),
    "granite": ("GraniteForCausalLM", GRANITE),
    "granite, biased, tied": (
        "GraniteForCausalLM",
        {**GRANITE, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "granite4": ("GraniteMoeHybridForCausalLM", GRANITE4),
    "granite4, not rotated, biased, tied": (
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE4,
            "attention_bias": True,
            "position_embedding_type": "nope",
            "tie_word_embeddings": True,
        },
    ),
    "granite4, mamba": ("GraniteMoeHybridForCausalLM", {**GRANITE4, **MAMBA}),
    "granite4, mamba, experts": (
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE4,
            **MAMBA,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "mamba_n_groups": 1,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "position_embedding_type": "nope",
        },
    ),
    "olmo hybrid": ("OlmoHybridForCausalLM", EVERY_FAMILY["OlmoHybridForCausalLM"]),
    "olmo hybrid, rotated, corrections below one": (
        "OlmoHybridForCausalLM",
        {
            **EVERY_FAMILY["OlmoHybridForCausalLM"],
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "linear_allow_neg_eigval": False,
            "linear_key_head_dim": None,
            "linear_value_head_dim": None,
        },
    ),
    "nemotron-h": ("NemotronHForCausalLM", EVERY_FAMILY["NemotronHForCausalLM"]),
    "nemotron-h, biased": (
        "NemotronHForCausalLM",
        {**EVERY_FAMILY["NemotronHForCausalLM"], "mlp_bias": True},
    ),
    "nemotron-h, groups of experts, biased": (
        "NemotronHForCausalLM",
        {
            **EVERY_FAMILY["NemotronHForCausalLM"],
            "layers_block_type": ["moe", "mamba", "attention", "mamba", "mlp"],
            "moe_latent_size": None,
            "n_group": 2,
            "topk_group": 1,
            "mlp_bias": True,
            "use_bias": True,
            "use_conv_bias": False,
            "norm_topk_prob": False,
        },
    ),
    "glm4": ("Glm4ForCausalLM", {"partial_rotary_factor": 0.5, "pad_token_id": 0}),
    "glm4, no bias, a quarter turns": (
        "Glm4ForCausalLM",
        {"attention_bias": False, "partial_rotary_factor": 0.25, "pad_token_id": 0},
    ),
    "seed-oss": ("SeedOssForCausalLM", {"model_type": "seed_oss"}),
    "seed-oss, biased elsewhere": (
        "SeedOssForCausalLM",
        {
            "model_type": "seed_oss",
            "attention_bias": False,
            "attention_out_bias": True,
            "mlp_bias": True,
        },
    ),
    "ernie 4.5": ("Ernie4_5ForCausalLM", {}),
    "ernie 4.5, biased, tied": (
        "Ernie4_5ForCausalLM",
        {"use_bias": True, "tie_word_embeddings": True},
    ),
    "cohere2": ("Cohere2ForCausalLM", COHERE2),
    "cohere2, biased, every second layer full": (
        "Cohere2ForCausalLM",
        {**COHERE2, "attention_bias": True, "layer_types": None, "sliding_window_pattern": 2},
    ),
    "phi3": ("Phi3ForCausalLM", {**PHI3, "head_dim": None, "hidden_size": 64}),
    "phi3, window, three quarters turn": (
        "Phi3ForCausalLM",
        {
            **PHI3,
            "head_dim": None,
            "hidden_size": 64,
            "sliding_window": 24,
            "partial_rotary_factor": 0.75,
        },
    ),
    "phi3, longrope beyond the original context": (
        "Phi3ForCausalLM",
        {**PHI3, "head_dim": None, "hidden_size": 64, **longrope(original=64)},
    ),
    "phi3, longrope within the original context, some of a head turns": (
        "Phi3ForCausalLM",
        {
            **PHI3,
            "head_dim": None,
            "hidden_size": 64,
            **longrope(original=512, pairs=6),
            "partial_rotary_factor": 0.75,
        },
    ),
    "ministral3": (
        "Ministral3ForCausalLM",
        {
            "rope_theta": None,
            "rope_parameters": {
                **YARN,
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    "exaone4, no windows": (
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    "exaone4": (
        "Exaone4ForCausalLM",
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2),
    "gemma2, biased, other caps, full layers": (
        "Gemma2ForCausalLM",
        {
            **GEMMA2,
            "attention_bias": True,
            "layer_types": ["full_attention"] * 2,
            "attn_logit_softcapping": 100.0,
            "final_logit_softcapping": 100.0,
        },
    ),
    "gemma3": ("Gemma3ForCausalLM", GEMMA3),
    "gemma3, linear rope in the full layer, capped logits, a window from the pattern": (
        "Gemma3ForCausalLM",
        {
            **GEMMA3,
            "layer_types": None,
            "sliding_window_pattern": 2,
            "rope_theta": 50000.0,
            "rope_local_base_freq": 3000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "final_logit_softcapping": 3.0,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    "gemma3, rope of each type": (
        "Gemma3ForCausalLM",
        {
            **GEMMA3,
            "rope_theta": None,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
            },
        },
    ),
    "gemma4, keys as values, other heads in full layers (31B)": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma4, unified, biased (12B)": (
        "Gemma4UnifiedForCausalLM",
        {
            **GEMMA4,
            "model_type": "gemma4_unified_text",
            "attention_bias": True,
            "tie_word_embeddings": False,
        },
    ),
    "gemma4, inputs of each layer, shared keys, wide feed-forwards (E2B)": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 512,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
        },
    ),
    "mixtral": ("MixtralForCausalLM", {**EXPERTS, "num_local_experts": 6, "sliding_window": None}),
    "mixtral, windowed, three of six": (
        "MixtralForCausalLM",
        {**EXPERTS, "num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 24},
    ),
    "qwen2 moe, a dense layer": (
        "Qwen2MoeForCausalLM",
        {
            **EXPERTS,
            "model_type": "qwen2_moe",
            "num_hidden_layers": 3,
            "mlp_only_layers": [1],
            "shared_expert_intermediate_size": 56,
            "head_dim": 12,
        },
    ),
    "qwen3 moe": ("Qwen3MoeForCausalLM", {**EXPERTS, "model_type": "qwen3_moe"}),
    "qwen3 moe, renormalised, every second layer, biased": (
        "Qwen3MoeForCausalLM",
        {
            **EXPERTS,
            "model_type": "qwen3_moe",
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "attention_bias": True,
        },
    ),
    "qwen2 moe, windows": (
        "Qwen2MoeForCausalLM",
        {
            **EXPERTS,
            "model_type": "qwen2_moe",
            "num_hidden_layers": 3,
            "shared_expert_intermediate_size": 56,
            "head_dim": 12,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 2,
        },
    ),
    "qwen3 moe, windows": (
        "Qwen3MoeForCausalLM",
        {
            **EXPERTS,
            "model_type": "qwen3_moe",
            "use_sliding_window": True,
            "sliding_window": 24,
        },
    ),
    "olmoe": ("OlmoeForCausalLM", {**EXPERTS, "head_dim": 12}),
    "olmoe, renormalised": (
        "OlmoeForCausalLM",
        {**EXPERTS, "head_dim": 12, "norm_topk_prob": True},
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        {
            **EXPERTS,
            "model_type": "gpt_oss",
            "num_local_experts": 6,
            "sliding_window": 24,
            "attention_bias": True,
            "rope_scaling": {**YARN, "truncate": False},
        },
    ),
    "granite moe": (
        "GraniteMoeForCausalLM",
        {**EXPERTS, **GRANITE, "model_type": "granitemoe", "num_local_experts": 6},
    ),
    "gemma 4, experts": (
        "Gemma4ForCausalLM",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 40,
        },
    ),
    "glm4 moe": ("Glm4MoeForCausalLM", GLM4_MOE),
    "glm4 moe, groups, norms of heads, biased": (
        "Glm4MoeForCausalLM",
        {
            **GLM4_MOE,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_group": 2,
            "topk_group": 1,
            "routed_scaling_factor": 1.7,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
        },
    ),
    "deepseek v3": ("DeepseekV3ForCausalLM", DEEPSEEK_V3),
    "deepseek v3, queries without a latent, yarn, pairs apart": (
        "DeepseekV3ForCausalLM",
        {
            **DEEPSEEK_V3,
            "q_lora_rank": NULL,
            "rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
            "rope_interleave": False,
            "norm_topk_prob": False,
            "n_shared_experts": 2,
        },
    ),
    "deepseek v3, biased": ("DeepseekV3ForCausalLM", {**DEEPSEEK_V3, "attention_bias": True}),
    "deepseek v2 lite": ("DeepseekV2ForCausalLM", {**DEEPSEEK_V2, "q_lora_rank": NULL}),
    "deepseek v2, groups of experts": (
        "DeepseekV2ForCausalLM",
        {
            **DEEPSEEK_V2,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
        },
    ),
    "deepseek v2, queries by a latent, yarn": (
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK_V2, "rope_scaling": {**YARN, "mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "glm4 moe lite": ("Glm4MoeLiteForCausalLM", GLM4_MOE_LITE),
    "glm4 moe lite, groups, experts first, biased": (
        "Glm4MoeLiteForCausalLM",
        {
            **GLM4_MOE_LITE,
            "mlp_layer_types": ["sparse", "dense"],
            "attention_bias": True,
            "n_group": 2,
            "routed_scaling_factor": 1.7,
            "rope_interleave": False,
        },
    ),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", HUNYUAN),
    "hunyuan, biased, base stretched": (
        "HunYuanDenseV1ForCausalLM",
        {
            **HUNYUAN,
            "attention_bias": True,
            "rope_scaling": {"type": "dynamic", "alpha": 50.0, "factor": 1.0},
        },
    ),
}


def write_case(tmp_path: Path, architecture: str, changes: dict[str, Any]) -> Path:
    config = tiny_config(architecture, **changes)
    config = {name: value for name, value in config.items() if value is not None}
    config = {name: None if value == NULL else value for name, value in config.items()}
    if architecture in ("MistralForCausalLM", "Exaone4ForCausalLM"):
        # Left out means 4,096 there, so that null has to be said.
        config.setdefault("sliding_window", None)
    return write_checkpoint(tmp_path / "model", config)


def assert_like_transformers(folder: Path) -> None:
    # Only eager experts multiply in float64.
    oracle = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, experts_implementation="eager"
    )
    oracle.eval()
    prompt = torch.randint(3, 259, (70,), generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(temperature=0, max_tokens=NUM_GREEDY_TOKENS, ignore_eos=True)
    # Chunks of 32 tokens: the prompt takes three steps; and a row of logits for each token.
    llm = LLM(
        str(folder),
        max_num_batched_tokens=32,
        max_num_seqs=1,
        dtype="float32",
        speculation=SpeculationConfig("off"),
    )
    logits = record_logits(llm)
    [completion] = llm.generate([prompt], params)
    assert completion.error is None
    tokens = [token.token_id for token in completion.samples[0].tokens]
    ids = prompt + tokens
    expected = logprobs_of(oracle, ids, [len(ids)])[len(prompt) - 1 : -1]
    found = torch.log_softmax(torch.cat(logits), -1)
    limit = MAX_LOGPROB_DIFFERENCE
    if (found - expected).abs().max() >= limit:
        # Three times as far as transformers is from itself, in one chunk and token by token with
        # products in float64, where that is more.
        whole, forms = expected, [1] * len(ids)
        expected = logprobs_of(oracle.double(), ids, forms)[len(prompt) - 1 : -1]
        limit = max(limit, 3 * (whole - expected).abs().max().item())
    assert (found - expected).abs().max().item() < limit
    chosen = expected.gather(1, torch.tensor(tokens)[:, None])[:, 0]
    assert (expected.amax(-1) - chosen).max().item() < limit


@pytest.mark.parametrize("case", CASES)
def test_logprobs_and_greedy_text_equal_transformers(case: str, tmp_path: Path) -> None:
    assert_like_transformers(write_case(tmp_path, *CASES[case]))


def test_absent_window_of_mistral_is_4096_as_in_transformers(tmp_path: Path) -> None:
    from localllm.model.families.table import read_architecture

    folder = write_case(tmp_path, "MistralForCausalLM", {})
    raw = json.loads((folder / "config.json").read_text())
    del raw["sliding_window"]
    (folder / "config.json").write_text(json.dumps(raw))
    assert [state.window for state in read_architecture(folder).states] == [4096, 4096]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_checkpoints_load_as_transformers_does(dtype: str, tmp_path: Path) -> None:
    folder = write_case(tmp_path, "LlamaForCausalLM", {"torch_dtype": dtype})
    assert_like_transformers(folder)


def test_sharded_checkpoint_equals_whole(tmp_path: Path) -> None:
    config = tiny_config("Qwen2ForCausalLM")
    whole = write_checkpoint(tmp_path / "whole", config)
    sharded = write_checkpoint(tmp_path / "sharded", config, num_shards=3)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    texts = [
        LLM(str(folder), max_num_seqs=1).generate("Some words", params)[0].text
        for folder in (whole, sharded)
    ]
    assert texts[0] == texts[1]


def test_built_in_model_equals_transformers() -> None:
    import localllm

    folder = Path(localllm.__file__).parent / "pocket"
    assert_like_transformers(folder)
