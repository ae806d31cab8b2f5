"""A small config for every kind of GGUF file, as config.json has it before the conversion."""

from dataclasses import dataclass, field
from typing import Any

from every_family import small_config

LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"


@dataclass(frozen=True)
class GgufModel:
    """The architecture by GGUF's name, and the config: that of a family in small with changes.

    A change to None leaves a field out; `nulls`: those that are null. `is_exact`: reading undoes
    what the converter does bit for bit, and no product has its rows in another order; so the logits
    are those of the checkpoint.
    """

    arch: str
    family: str
    changes: dict[str, Any] = field(default_factory=dict)
    is_exact: bool = True
    nulls: tuple[str, ...] = ()

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        whole = {**small_config(self.family), **self.changes}
        said = {name: value for name, value in whole.items() if value is not None}
        return {**said, **dict.fromkeys(self.nulls)}


_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
_LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6],
    "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 4.5],
}
_TIED = {"tie_word_embeddings": True}
_GEMMA = {**_TIED, "query_pre_attn_scalar": 16}
_GEMMA3 = {
    **_GEMMA,
    "model_type": "gemma3_text",
    "num_hidden_layers": 7,
    "layer_types": [SLIDING] * 5 + [FULL, SLIDING],
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 20000.0,
}
_GEMMA4 = {
    "model_type": "gemma4_text",
    "rope_theta": None,
    "rope_parameters": {
        FULL: {
            "rope_type": "proportional",
            "partial_rotary_factor": 0.25,
            "rope_theta": 1000000.0,
        },
        SLIDING: {"rope_type": "default", "rope_theta": 20000.0},
    },
    "final_logit_softcapping": 30.0,
    **_TIED,
}
_MAMBA = {"mamba_expand": 2, "mamba_d_head": 16, "position_embedding_type": "nope"}
_GRANITE = {"model_type": "granitemoehybrid", "num_experts_per_tok": None}
_NEMOTRON = ["mamba", "moe", "attention", "mamba"]
_SIGMOID = {"scoring_func": "sigmoid", "num_experts": None}
_LFM2 = {
    **_TIED,
    "conv_L_cache": 3,
    "conv_bias": False,
    "block_ffn_dim_multiplier": 1.0,
    "block_multiple_of": 32,
    "rms_norm_eps": None,
    "norm_eps": 1e-5,
}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "mlp_only_layers": None,
    "intermediate_size": 96,
}

GGUF_MODELS: dict[str, GgufModel] = {
    "llama": GgufModel("llama", "LlamaForCausalLM"),
    "llama, biases": GgufModel(
        "llama", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, **_TIED}
    ),
    "llama, stretched": GgufModel(
        "llama", "LlamaForCausalLM", {"rope_scaling": _LLAMA3}, is_exact=False
    ),
    "llama, mistral": GgufModel("llama", "MistralForCausalLM", {"sliding_window": None}),
    "llama, experts": GgufModel("llama", "MixtralForCausalLM", {"sliding_window": None}),
    "mistral3": GgufModel(
        "mistral3",
        "Ministral3ForCausalLM",
        {
            "rope_parameters": {
                **_YARN,
                "rope_theta": 10000.0,
                "llama_4_scaling_beta": 0.1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            }
        },
    ),
    "qwen2": GgufModel("qwen2", "Qwen2ForCausalLM"),
    "qwen2, yarn": GgufModel("qwen2", "Qwen2ForCausalLM", {"rope_scaling": _YARN}),
    "qwen2moe": GgufModel("qwen2moe", "Qwen2MoeForCausalLM", {"norm_topk_prob": False}),
    "qwen3": GgufModel("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": GgufModel("qwen3moe", "Qwen3MoeForCausalLM"),
    "qwen3next": GgufModel("qwen3next", "Qwen3NextForCausalLM", _DELTA, is_exact=False),
    "qwen35": GgufModel("qwen35", "Qwen3_5ForCausalLM", _DELTA, is_exact=False),
    "qwen35, as many keys": GgufModel(
        "qwen35", "Qwen3_5ForCausalLM", {**_DELTA, "linear_num_key_heads": 4}, is_exact=False
    ),
    "qwen35moe": GgufModel("qwen35moe", "Qwen3_5MoeForCausalLM", _DELTA, is_exact=False),
    "gemma2": GgufModel("gemma2", "Gemma2ForCausalLM", _GEMMA, is_exact=False),
    "gemma3": GgufModel("gemma3", "Gemma3ForCausalLM", _GEMMA3, is_exact=False),
    "gemma3, linear": GgufModel(
        "gemma3",
        "Gemma3ForCausalLM",
        {**_GEMMA3, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        is_exact=False,
    ),
    "gemma4": GgufModel("gemma4", "Gemma4ForCausalLM", _GEMMA4),
    "gemma4, keys as values": GgufModel(
        "gemma4",
        "Gemma4ForCausalLM",
        {
            **_GEMMA4,
            "num_hidden_layers": 2,
            "layer_types": [SLIDING, FULL],
            "num_kv_shared_layers": 0,
            "use_double_wide_mlp": False,
            "hidden_size_per_layer_input": 0,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
        },
    ),
    "gemma4, experts": GgufModel(
        "gemma4", "Gemma4ForCausalLM, experts", {**_GEMMA4, "num_kv_shared_layers": 0}
    ),
    "phi3": GgufModel("phi3", "Phi3ForCausalLM", {"original_max_position_embeddings": 512}),
    "phi3, long": GgufModel(
        "phi3",
        "Phi3ForCausalLM",
        {
            "rope_scaling": _LONGROPE,
            "sliding_window": 24,
            "original_max_position_embeddings": 32,
        },
        is_exact=False,
    ),
    "olmo2": GgufModel("olmo2", "Olmo2ForCausalLM"),
    "olmo2, windows": GgufModel(
        "olmo2", "Olmo3ForCausalLM", {"rope_scaling": {**_YARN, "attention_factor": 1.25}}
    ),
    "olmoe": GgufModel("olmoe", "OlmoeForCausalLM", {"norm_topk_prob": False}),
    "smollm3": GgufModel(
        "smollm3",
        "SmolLM3ForCausalLM",
        {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
        is_exact=False,
    ),
    "granite": GgufModel("granite", "GraniteForCausalLM"),
    "granite, of hybrids": GgufModel(
        "granite",
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE, **_MAMBA, "layer_types": ["attention"] * 3, "position_embedding_type": "rope"},
    ),
    "granitemoe": GgufModel(
        "granitemoe", "GraniteMoeForCausalLM", {"embedding_multiplier": 6.0, "logits_scaling": 3.0}
    ),
    "granitemoe, of hybrids": GgufModel(
        "granitemoe",
        "GraniteMoeHybridForCausalLM",
        {
            **_GRANITE,
            **_MAMBA,
            "layer_types": ["attention"] * 3,
            "position_embedding_type": "rope",
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
        },
    ),
    "granitehybrid": GgufModel(
        "granitehybrid", "GraniteMoeHybridForCausalLM", {**_GRANITE, **_MAMBA}, is_exact=False
    ),
    "granitehybrid, experts": GgufModel(
        "granitehybrid",
        "GraniteMoeHybridForCausalLM",
        {**_GRANITE, **_MAMBA, "num_local_experts": 6, "num_experts_per_tok": 2},
        is_exact=False,
    ),
    "nemotron_h": GgufModel(
        "nemotron_h",
        "NemotronHForCausalLM",
        {
            "model_type": "nemotron_h_dense",
            "conv_kernel": 4,
            "layers_block_type": None,
            "hybrid_override_pattern": "M-*M",
            "num_hidden_layers": 4,
            "num_experts_per_tok": None,
            "n_routed_experts": None,
        },
        is_exact=False,
    ),
    "nemotron_h_moe": GgufModel(
        "nemotron_h_moe",
        "NemotronHForCausalLM",
        {"layers_block_type": _NEMOTRON, "num_hidden_layers": 4, "conv_kernel": 4},
        is_exact=False,
    ),
    "nemotron_h_moe, no latents": GgufModel(
        "nemotron_h_moe",
        "NemotronHForCausalLM",
        {
            "layers_block_type": _NEMOTRON,
            "num_hidden_layers": 4,
            "conv_kernel": 4,
            "moe_latent_size": None,
        },
        is_exact=False,
    ),
    "lfm2": GgufModel("lfm2", "Lfm2ForCausalLM", _LFM2),
    "lfm2moe": GgufModel("lfm2moe", "Lfm2MoeForCausalLM", {**_LFM2, "use_expert_bias": True}),
    "deepseek2, v2": GgufModel("deepseek2", "DeepseekV2ForCausalLM", {"topk_method": "greedy"}),
    "deepseek2, v2 lite": GgufModel(
        "deepseek2", "DeepseekV2ForCausalLM", {"topk_method": "greedy"}, nulls=("q_lora_rank",)
    ),
    "deepseek2, v2 in groups": GgufModel(
        "deepseek2",
        "DeepseekV2ForCausalLM",
        {"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
    ),
    "deepseek2, v3": GgufModel("deepseek2", "DeepseekV3ForCausalLM", _SIGMOID),
    "deepseek2, yarn": GgufModel(
        "deepseek2",
        "DeepseekV3ForCausalLM",
        {**_SIGMOID, "rope_scaling": {**_YARN, "mscale": 0.707, "mscale_all_dim": 0.707}},
    ),
    "deepseek2, glm": GgufModel(
        "deepseek2",
        "Glm4MoeLiteForCausalLM",
        {"rope_interleave": None, "first_k_dense_replace": 1, "num_experts": None},
    ),
    "glm4": GgufModel("glm4", "Glm4ForCausalLM"),
    "glm4moe": GgufModel(
        "glm4moe",
        "Glm4MoeForCausalLM",
        {
            "model_type": "glm4_moe",
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "attention_bias": True,
            "num_experts": None,
        },
    ),
    "gpt-oss": GgufModel(
        "gpt-oss", "GptOssForCausalLM", {"rope_scaling": {**_YARN, "truncate": False}}
    ),
    "cohere2": GgufModel(
        "cohere2",
        "Cohere2ForCausalLM",
        {
            **_TIED,
            "rms_norm_eps": None,
            "rotary_pct": 1.0,
            "num_hidden_layers": 5,
            "layer_types": [SLIDING] * 3 + [FULL, SLIDING],
        },
    ),
    "exaone4": GgufModel("exaone4", "Exaone4ForCausalLM"),
    "exaone4, stretched": GgufModel(
        "exaone4",
        "Exaone4ForCausalLM",
        {"sliding_window": None, "layer_types": None, "rope_scaling": _LLAMA3},
        is_exact=False,
    ),
    "ernie4_5": GgufModel("ernie4_5", "Ernie4_5ForCausalLM"),
    "hunyuan-dense": GgufModel("hunyuan-dense", "HunYuanDenseV1ForCausalLM"),
    "hunyuan-dense, stretched": GgufModel(
        "hunyuan-dense",
        "HunYuanDenseV1ForCausalLM",
        {
            "max_position_embeddings": 32768,
            "rope_scaling": {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
        is_exact=False,
    ),
    "seed_oss": GgufModel(
        "seed_oss", "SeedOssForCausalLM", {"attention_out_bias": False, "mlp_bias": False}
    ),
}
