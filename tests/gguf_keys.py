"""The keys that llama.cpp's converter writes for a config.json."""

from math import log, sqrt
from typing import Any

from gguf import ExpertGatingFuncType, GGUFWriter, RopeScalingType

_SLIDING = "sliding_attention"
_ROPES = {
    "yarn": RopeScalingType.YARN,
    "linear": RopeScalingType.LINEAR,
}
# config.json's names, and those of what writes them.
_NUMBERS = {
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "head_count",
    "num_key_value_heads": "head_count_kv",
    "rms_norm_eps": "layer_norm_rms_eps",
    "norm_eps": "layer_norm_rms_eps",
    "layer_norm_epsilon": "layer_norm_rms_eps",
    "layer_norm_eps": "layer_norm_eps",
    "num_local_experts": "expert_count",
    "num_experts": "expert_count",
    "n_routed_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length",
    "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "num_dense_layers": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
    "sliding_window": "sliding_window",
    "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
    "logit_scale": "logit_scale",
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "moe_latent_size": "moe_latent_size",
    "conv_L_cache": "shortconv_l_cache",
}
_DELTA_NET = {
    "linear_conv_kernel_dim": "ssm_conv_kernel",
    "linear_key_head_dim": "ssm_state_size",
    "linear_num_key_heads": "ssm_group_count",
    "linear_num_value_heads": "ssm_time_step_rank",
}
_MAMBA = {
    **dict.fromkeys(("mamba_d_conv", "conv_kernel"), "ssm_conv_kernel"),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size"), "ssm_state_size"),
    **dict.fromkeys(("mamba_n_groups", "n_groups"), "ssm_group_count"),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), "ssm_time_step_rank"),
}
# Architectures of which the converter writes no such key.
_WITHOUT = {
    "sliding_window": ("llama", "mistral3", "qwen2", "qwen3", "qwen2moe", "qwen3moe"),
    "num_experts": ("granitemoe", "granitehybrid", "granite", "nemotron_h"),
    "moe_intermediate_size": (
        *("llama", "olmoe", "granitemoe", "granitehybrid", "gpt-oss", "granite", "nemotron_h"),
    ),
    **dict.fromkeys(
        ("moe_shared_expert_intermediate_size", "routed_scaling_factor", "moe_latent_size"),
        ("nemotron_h",),
    ),
}
_TURNED_WHOLE = (
    *("llama", "mistral3", "smollm3", "granite", "granitemoe", "granitehybrid", "cohere2"),
    *("nemotron_h", "nemotron_h_moe", "phi3"),
)


def add_keys(writer: GGUFWriter, arch: str, config: dict[str, Any], head_layers: int) -> None:
    """Write them; `head_layers`: see `write_gguf`."""
    layers = config["num_hidden_layers"]
    writer.add_block_count(layers + head_layers)
    if head_layers:
        writer.add_nextn_predict_layers(head_layers)
    if "num_key_value_heads" not in config:
        config["num_key_value_heads"] = config["num_attention_heads"]
    for table in (_NUMBERS, _DELTA_NET, _MAMBA):
        for name, kind in table.items():
            if config.get(name) is not None and arch not in _WITHOUT.get(name, ()):
                getattr(writer, f"add_{kind}")(config[name])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if "head_dim" in config and not arch.startswith("granite"):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    _add_rope(writer, arch, config, head_dim)
    for part, add in _PARTS.items():
        if arch in part:
            add(writer, config)


def _add_rope(writer: GGUFWriter, arch: str, config: dict[str, Any], head_dim: int) -> None:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = config.get("rope_theta") or rope.get("rope_theta", 10000.0)
    if arch != "gemma2":
        writer.add_rope_freq_base(base)
    kind = rope.get("rope_type")
    if kind in _ROPES:
        writer.add_rope_scaling_type(_ROPES[kind])
        writer.add_rope_scaling_factor(rope["factor"])
    if kind == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
        if "attention_factor" in rope:
            writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])
    if kind == "dynamic":
        scale = rope["alpha"] ** (head_dim / (head_dim - 2))
        writer.add_rope_freq_base(config["rope_theta"] * scale)
        writer.add_rope_scaling_type(RopeScalingType.NONE)
        writer.add_rope_scaling_factor(1)
        writer.add_rope_scaling_orig_ctx_len(256 * 1024)
        writer.add_context_length(256 * 1024)
    if arch in _TURNED_WHOLE:
        writer.add_rope_dimension_count(head_dim)
    elif arch in ("glm4", "glm4moe", "qwen3next", "qwen35", "qwen35moe"):
        writer.add_rope_dimension_count(int(head_dim * config["partial_rotary_factor"]))
    if arch == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _windows(writer: GGUFWriter, config: dict[str, Any]) -> None:
    if config.get("sliding_window") is not None:
        writer.add_sliding_window_pattern([kind == _SLIDING for kind in config["layer_types"]])


def _phi3(writer: GGUFWriter, config: dict[str, Any]) -> None:
    original, context = (
        config["original_max_position_embeddings"],
        config["max_position_embeddings"],
    )
    writer.add_rope_scaling_orig_ctx_len(original)
    if config.get("sliding_window") is None:
        writer.add_sliding_window(0)
    if context > original:
        writer.add_rope_scaling_attn_factors(sqrt(1 + log(context / original) / log(original)))


def _gemma3(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_freq_base_swa(config["rope_local_base_freq"])


def _gemma4(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rope, kinds = config["rope_parameters"], config["layer_types"]
    full, own = config["global_head_dim"], config["head_dim"]
    shared, layers = config["num_kv_shared_layers"], config["num_hidden_layers"]
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_shared_kv_layers(shared)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    _windows(writer, config)
    for suffix, width in (("", full), ("_swa", own)):
        for kind in ("key_length", "value_length", "rope_dimension_count"):
            getattr(writer, f"add_{kind}{suffix}")(width)
    if config.get("use_double_wide_mlp"):
        inner = config["intermediate_size"]
        writer.add_feed_forward_length([inner] * (layers - shared) + [2 * inner] * shared)
    if "num_global_key_value_heads" in config:
        counts = {_SLIDING: config["num_key_value_heads"]}
        other = config["num_global_key_value_heads"]
        writer.add_head_count_kv([counts.get(kind, other) for kind in kinds])
    if "top_k_experts" in config:
        writer.add_expert_used_count(config["top_k_experts"])


def _delta_net(writer: GGUFWriter, config: dict[str, Any]) -> None:
    count, width = config["linear_num_value_heads"], config["linear_value_head_dim"]
    writer.add_ssm_inner_size(count * width)
    writer.add_full_attention_interval(4)
    recurrent = [kind == "linear_attention" for kind in config["layer_types"]]
    [keys] = writer.kv_data
    recurrent += [False] * (keys[f"{writer.arch}.block_count"].value - len(recurrent))
    writer.add_array(f"{writer.arch}.attention.recurrent_layers", recurrent)


def _sections(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_dimension_sections([11, 11, 10, 0])


def _cohere2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(RopeScalingType.NONE)


def _granite(writer: GGUFWriter, config: dict[str, Any]) -> None:
    kinds = config.get("layer_types")
    if kinds is None:
        return
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "full_attention" else 0 for kind in kinds])
    writer.add_ssm_inner_size(config["mamba_expand"] * config["hidden_size"])
    has_mamba = {*kinds} != {"full_attention"}
    writer.add_rope_scaling_finetuned(not has_mamba)
    if has_mamba:
        writer.add_context_length(1 << 20)


def _nemotron(writer: GGUFWriter, config: dict[str, Any]) -> None:
    letters = {"mamba": "M", "moe": "E", "full_attention": "*", "attention": "*", "mlp": "-"}
    kinds = config.get("hybrid_override_pattern") or config["layers_block_type"]
    kinds = [letters.get(kind, kind) for kind in kinds]
    wide = config["moe_intermediate_size"] if "E" in kinds else config["intermediate_size"]
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([heads if kind == "*" else 0 for kind in kinds])
    writer.add_feed_forward_length([wide if kind in "E-" else 0 for kind in kinds])
    writer.add_layer_norm_eps(config["layer_norm_epsilon"])
    writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])
    writer.add_rope_scaling_finetuned(False)
    writer.add_context_length(1 << 20)
    if "E" in kinds:
        writer.add_expert_weights_norm(True)
        writer.add_expert_shared_count(1)
        writer.add_expert_group_count(1)
        writer.add_expert_group_used_count(1)


def _lfm2(writer: GGUFWriter, config: dict[str, Any]) -> None:
    heads = config["num_key_value_heads"]
    writer.add_head_count_kv([0 if kind == "conv" else heads for kind in config["layer_types"]])


def _sigmoid(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)


def _deepseek(writer: GGUFWriter, config: dict[str, Any]) -> None:
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    writer.add_head_count_kv(1)
    writer.add_key_length(rank + rope)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + rope)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(rope)
    if config.get("scoring_func") == "sigmoid":
        _sigmoid(writer, config)
    if "V2" not in config["architectures"][0]:
        writer.add_expert_weights_norm(True)
    multiplier = (config.get("rope_scaling") or {}).get("mscale_all_dim")
    if multiplier is not None:
        writer.add_rope_scaling_yarn_log_mul(0.1 * multiplier)


def _glm4_moe(writer: GGUFWriter, config: dict[str, Any]) -> None:
    _sigmoid(writer, config)
    writer.add_expert_weights_norm(config["norm_topk_prob"])


def _gpt_oss(writer: GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_expert_feed_forward_length(config["intermediate_size"])


_PARTS = {
    ("olmo2", "exaone4"): _windows,
    ("phi3",): _phi3,
    ("gemma3",): _gemma3,
    ("gemma4",): _gemma4,
    ("qwen3next", "qwen35", "qwen35moe"): _delta_net,
    ("qwen35", "qwen35moe", ""): _sections,
    ("granite", "granitemoe", "granitehybrid"): _granite,
    ("nemotron_h", "nemotron_h_moe"): _nemotron,
    ("lfm2", "lfm2moe"): _lfm2,
    ("lfm2moe", ""): _sigmoid,
    ("deepseek2",): _deepseek,
    ("glm4moe",): _glm4_moe,
    ("cohere2",): _cohere2,
    ("gpt-oss",): _gpt_oss,
}
