"""What each class takes where config.json leaves a field out.

Files that transformers writes hold only what differs from these. Source: the config classes of
transformers 5.23 (`tests/model/test_class_defaults.py` compares them). Left out here are the values
that every reader takes anyway, and the ids of end tokens, which may stand in other files.
"""

from collections.abc import Mapping
from typing import Any


def _sizes(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, vocab_size: int, context: int
) -> dict[str, int]:
    return {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": context,
    }


_DELTA_NET = {
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_DELTA_NET_EXPERTS = {
    **_DELTA_NET,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_LATENT = {
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "sliding_window": 4096,
}
_GEMMA4 = {
    **_GEMMA,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "full_attention": {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
    },
}
CLASS_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": _sizes(4096, 11008, 32, 32, 32000, 2048),
    "MistralForCausalLM": {
        **_sizes(4096, 14336, 32, 32, 32000, 131072),
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "Qwen3NextForCausalLM": {
        **_sizes(2048, 5632, 48, 16, 151936, 32768),
        **_DELTA_NET_EXPERTS,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
    "Qwen3_5ForCausalLM": {
        **_sizes(4096, 12288, 32, 16, 248320, 32768),
        **_DELTA_NET,
        "num_key_value_heads": 4,
    },
    "Qwen3_5MoeForCausalLM": {
        **_sizes(2048, 0, 40, 16, 248320, 32768),
        **_DELTA_NET_EXPERTS,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    "Lfm2ForCausalLM": {
        **_sizes(2560, 12288, 32, 32, 65536, 128000),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "block_multiple_of": 256,
        "block_auto_adjust_ff_dim": True,
        "rope_theta": 1000000.0,
    },
    "Lfm2MoeForCausalLM": {
        **_sizes(2048, 7168, 32, 32, 65536, 128000),
        "moe_intermediate_size": 1792,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_L_cache": 3,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "rope_theta": 1000000.0,
    },
    "Lfm3ForCausalLM": {
        **_sizes(2048, 7680, 24, 16, 128000, 128000),
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "conv_L_cache": 7,
        "sliding_window": 256,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.5,
                "rope_theta": 1000000.0,
            },
        },
    },
    "Qwen2ForCausalLM": {
        **_sizes(4096, 22016, 32, 32, 151936, 32768),
        "num_key_value_heads": 32,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        **_sizes(4096, 22016, 32, 32, 151936, 32768),
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Cohere2ForCausalLM": {
        **_sizes(8192, 22528, 40, 64, 256000, 8192),
        "layer_norm_eps": 1e-5,
        "logit_scale": 0.0625,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
    },
    "Ernie4_5ForCausalLM": {
        **_sizes(1024, 3072, 18, 16, 103424, 131072),
        "num_key_value_heads": 2,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    },
    "Exaone4ForCausalLM": {
        **_sizes(4096, 16384, 32, 32, 102400, 2048),
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-5,
        "sliding_window": 4096,
        "sliding_window_pattern": 4,
    },
    "Gemma2ForCausalLM": {
        **_sizes(2304, 9216, 26, 8, 256000, 8192),
        **_GEMMA,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    "Gemma3ForCausalLM": {
        **_sizes(2304, 9216, 26, 8, 262208, 131072),
        **_GEMMA,
        "query_pre_attn_scalar": 256,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    "Gemma4ForCausalLM": {
        **_sizes(2304, 9216, 30, 8, 262144, 131072),
        **_GEMMA4,
        "sliding_window": 512,
    },
    "Gemma4UnifiedForCausalLM": {
        **_sizes(2304, 9216, 30, 8, 262144, 262144),
        **_GEMMA4,
        "sliding_window": 1024,
    },
    "Glm4ForCausalLM": {
        **_sizes(4096, 13696, 40, 32, 151552, 131072),
        "num_key_value_heads": 2,
        "head_dim": 128,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-07,
    },
    "GraniteForCausalLM": _sizes(4096, 11008, 32, 32, 32000, 2048),
    "GptOssForCausalLM": {
        **_sizes(2880, 2880, 36, 64, 201088, 131072),
        "num_key_value_heads": 8,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "sliding_window": 128,
        "rope_theta": 150000.0,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    "GraniteMoeForCausalLM": {
        **_sizes(4096, 11008, 32, 32, 32000, 2048),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "GraniteMoeHybridForCausalLM": {
        **_sizes(4096, 11008, 32, 32, 32000, 2048),
        "shared_intermediate_size": 1024,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "HunYuanDenseV1ForCausalLM": {
        **_sizes(4096, 11008, 32, 32, 290943, 2048),
        "rms_norm_eps": 1e-5,
    },
    "Ministral3ForCausalLM": {
        **_sizes(4096, 14336, 34, 32, 131072, 262144),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
    },
    "NemotronHForCausalLM": {
        **_sizes(4096, 21504, 4, 32, 131072, 4096),
        "num_key_value_heads": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 7688,
        "moe_shared_expert_intermediate_size": 7688,
    },
    "Olmo2ForCausalLM": {**_sizes(4096, 11008, 32, 32, 50304, 2048), "rms_norm_eps": 1e-5},
    "Olmo3ForCausalLM": {
        **_sizes(4096, 11008, 32, 32, 50304, 2048),
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "sliding_window": 4096,
    },
    "OlmoHybridForCausalLM": _sizes(3840, 11008, 32, 30, 100352, 65536),
    "Phi3ForCausalLM": {
        **_sizes(3072, 8192, 32, 32, 32064, 4096),
        "original_max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
    },
    "SeedOssForCausalLM": {
        **_sizes(4096, 27648, 64, 80, 155136, 524288),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "attention_bias": True,
    },
    "SmolLM3ForCausalLM": {
        **_sizes(2048, 11008, 36, 16, 128256, 32768),
        "num_key_value_heads": 4,
        "rope_theta": 2000000.0,
        "tie_word_embeddings": True,
    },
    "MixtralForCausalLM": {
        **_sizes(4096, 14336, 32, 32, 32000, 131072),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen2MoeForCausalLM": {
        **_sizes(2048, 5632, 24, 16, 151936, 32768),
        "num_key_value_heads": 16,
        "sliding_window": 4096,
        "max_window_layers": 28,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
    },
    "Qwen3MoeForCausalLM": {
        **_sizes(2048, 6144, 24, 32, 151936, 32768),
        "num_key_value_heads": 4,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "OlmoeForCausalLM": {
        **_sizes(2048, 2048, 16, 16, 50304, 4096),
        "rms_norm_eps": 1e-5,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
    "Glm4MoeForCausalLM": {
        **_sizes(4096, 10944, 46, 96, 151552, 131072),
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    "Glm4MoeLiteForCausalLM": {
        **_sizes(2048, 10240, 47, 20, 154880, 202752),
        **_LATENT,
        "rms_norm_eps": 1e-5,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.8,
    },
    "DeepseekV2ForCausalLM": {
        **_sizes(4096, 11008, 32, 32, 102400, 2048),
        **_LATENT,
        "n_routed_experts": 64,
        "moe_intermediate_size": 1407,
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
    },
    "DeepseekV3ForCausalLM": {
        **_sizes(7168, 18432, 61, 128, 129280, 4096),
        **_LATENT,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "n_group": 8,
        "topk_group": 4,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": 3,
    },
}
