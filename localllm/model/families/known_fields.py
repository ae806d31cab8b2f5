"""Which fields of a config.json are known, besides those that a family's reader asks for.

A field that nobody knows is ignored, as transformers ignores it, and named in a warning: it may be
a note of somebody's, or change what a model computes in the program that wrote it.
`tests/model/test_known_fields.py` compares the names with the classes of transformers 5.24.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from localllm.model.config_fields import ConfigFields

# Names that change no logits of a loaded model, whatever their value.
_HARMLESS = (
    # Where the files are from.
    "name_or_path model_type model_name model_name_or_path tokenizer_class task_specific_params "
    "auto_map version license description transformers_weights custom_pipelines is_llama_config "
    "transformers.js_config "
    # Written answers; ids of tokens, which are read from the tokenizer's files.
    "eos_ids token_ids tokens_per_image prefix do_sample temperature top_k top_p typical_p min_p "
    "repetition_penalty length_penalty diversity_penalty max_length min_length max_new_tokens "
    "num_beams num_beam_groups num_return_sequences early_stopping bad_words_ids suppress_tokens "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size encoder_repetition_penalty epsilon_cutoff "
    "begin_suppress_tokens remove_invalid_values exponential_decay_length_penalty eta_cutoff "
    "num_assistant_tokens num_assistant_tokens_schedule target_lookbehind generation_config "
    "max_sequence_length model_max_length max_seq_len max_seq_length seq_length n_ctx "
    "initial_context_length "
    # What a call returns, and how it is computed.
    "dtype torch_dtype use_cache return_dict is_decoder is_encoder_decoder add_cross_attention "
    "cross_attention_hidden_size torchscript use_bfloat16 tie_encoder_decoder chunk_size "
    "chunk_size_feed_forward pruned_heads num_logits_to_keep mamba_ssm_dtype mamba_chunk_size "
    "mamba_ssm_cache_dtype pretraining_tp ep_size cache_implementation softmax_in_fp32 "
    "attention_softmax_in_fp32 residual_in_fp32 moe_shared_expert_overlap "
    # Training.
    "seq_aux aux_loss_alpha gradient_checkpointing rescale_prenorm_residual label_smoothing "
    "time_step_min time_step_max time_step_floor time_step_init_scheme z_loss_weight "
    # Models that score texts.
    "id2label label2id num_labels problem_type finetuning_task "
    # Further heads, and other parts of the same repository; see mtp.py and tower.py.
    "num_nextn_predict_layers next_n text_config spatial_merge_size "
    "quantization_config compression_config"
)
_NAMES = frozenset(_HARMLESS.split())
_PATTERNS = re.compile(
    r"_.*|.*_version|.*_token_ids?|.*_token_index|.*_tokens?_id|output_.*|.*_implementation"
    r"|assistant_.*|use_flash.*|use_mamba_kernels|use_fused_.*|use_sdpa.*|fused_.*"
    r"|.*dropout.*|.*_pdrop|init_.*|initializer_.*|.*_init_.*|.*_loss_coef|.*_aux_loss.*|.*jitter.*"
    r"|linear_(dt|a_log)_.*|unsloth_.*|lora_.*|peft_.*|sentence_.*|mtp_.*|num_mtp_.*|medusa_.*"
    r"|vision_.*|audio_.*|image_.*|video_.*|mm_.*|projector_.*"
)
# Names of what changes nothing where it is 1.
_FACTOR = re.compile(r".*(factor|ratio|scale|scaling|multiplier)")
# By class: fields that it has, but that change nothing there, or only beside others.
_LATENT = ("num_key_value_heads", "head_dim", "qk_head_dim", "n_group", "topk_group")
_GEMMA4 = (
    *("global_head_dim", "num_global_key_value_heads", "vocab_size_per_layer_input"),
    *("moe_intermediate_size", "num_experts", "top_k_experts"),
)
_OF_CLASS: Mapping[str, Collection[str]] = {
    "Cohere2ForCausalLM": (
        *("sliding_window_pattern", "order_of_interleaved_layers", "layer_switch", "rotary_pct"),
        *("position_embedding_type", "use_embedding_sharing", "use_gated_activation"),
        "use_parallel_block",
    ),
    "DeepseekV2ForCausalLM": _LATENT,
    "DeepseekV3ForCausalLM": _LATENT,
    "Exaone4ForCausalLM": ("sliding_window_pattern",),
    "Gemma2ForCausalLM": ("sliding_window_size",),
    "Gemma3ForCausalLM": ("sliding_window_pattern",),
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4UnifiedForCausalLM": _GEMMA4,
    "Glm4MoeForCausalLM": ("topk_group",),
    "Glm4MoeLiteForCausalLM": _LATENT,
    "GptOssForCausalLM": ("hidden_act", "experts_per_token"),
    "GraniteMoeHybridForCausalLM": (
        *("mamba_conv_bias", "mamba_d_conv", "mamba_d_head", "mamba_d_state", "mamba_expand"),
        *("mamba_n_groups", "mamba_n_heads", "mamba_proj_bias", "time_step_limit"),
        *("num_experts_per_tok", "num_local_experts"),
    ),
    "HunYuanDenseV1ForCausalLM": (
        *("attention_head_dim", "cla_share_factor", "dense_list", "norm_type", "org_vocab_size"),
        *("pool_type", "use_qk_norm", "use_rotary_pos_emb", "mask_init_id", "skip_cls_token"),
        *("im_start_id", "im_end_id", "im_newline_id", "text_start_id", "text_end_id"),
        *("num_media_embeds", "max_image_size", "anyres_pooling_size", "vit_path", "vit_type"),
    ),
    "Lfm2ForCausalLM": (
        *("block_ffn_dim_multiplier", "block_multiple_of", "block_dim", "conv_dim", "conv_dim_out"),
        *("block_mlp_init_scale", "block_out_init_scale", "block_use_swiglu", "block_norm_eps"),
        *("block_use_xavier_init", "conv_use_xavier_init", "num_heads", "use_pos_enc"),
        *("full_attn_idxs", "theta"),
    ),
    "Lfm2MoeForCausalLM": ("conv_dim", "num_heads", "use_pos_enc", "full_attn_idxs"),
    "NemotronHForCausalLM": (
        *("num_hidden_layers", "hybrid_override_pattern", "layer_types", "attention_head_dim"),
        *("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "conv_kernel", "n_groups"),
        *("use_bias", "use_conv_bias", "time_step_limit", "expand", "mlp_bias", "mlp_hidden_act"),
        *("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "n_group"),
        *("moe_shared_expert_intermediate_size", "moe_latent_size", "norm_topk_prob"),
        *("routed_scaling_factor", "topk_group", "n_shared_experts", "intermediate_size"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "norm_eps"),
        *("attention_bias", "mamba_proj_bias", "sliding_window"),
    ),
    "Phi3ForCausalLM": ("full_attn_mod", "interpolate_factor"),
    "Qwen2MoeForCausalLM": ("max_window_layers", "sliding_window"),
    "Qwen3MoeForCausalLM": ("max_window_layers", "sliding_window"),
    "Qwen3NextForCausalLM": ("full_attention_interval",),
    "Qwen3_5ForCausalLM": ("full_attention_interval",),
    "Qwen3_5MoeForCausalLM": ("full_attention_interval", "intermediate_size"),
    "SmolLM3ForCausalLM": (
        *("use_sliding_window", "sliding_window", "no_rope_layer_interval", "max_window_layers"),
    ),
}
# Of a rotation: what read_rope asks for; what families ask for themselves; and how the rotation
# takes the places in images, which texts do not have.
_ROPE_NAMES = (
    "rope_theta rope_type type factor low_freq_factor high_freq_factor beta_fast beta_slow "
    "original_max_position_embeddings attention_factor mscale mscale_all_dim truncate short_factor "
    "long_factor partial_rotary_factor mrope_section mrope_interleaved finetuned"
)
_ROPE = frozenset(_ROPE_NAMES.split())
_ROPE_OF_CLASS = {
    "HunYuanDenseV1ForCausalLM": {"alpha"},
    "Ministral3ForCausalLM": {"llama_4_scaling_beta", "max_position_embeddings"},
}


def is_harmless(name: str, architecture: str) -> bool:
    """Whether a field changes nothing, as far as a reader of the class does not ask for it."""
    own = _OF_CLASS.get(architecture, ())
    return name in _NAMES or name in own or _PATTERNS.fullmatch(name) is not None


def unknown_fields(fields: ConfigFields, architecture: str) -> Iterator[str]:
    """The fields that a reader did not ask for, and that may change something: those of `fields`,
    which holds the file's own ones.
    """
    for name, value in fields.raw.items():
        says_something = value not in (None, False, 0, "", [], {}, "none", "default")
        if _FACTOR.fullmatch(name) and value == 1:
            says_something = False
        is_known = name in fields.read or is_harmless(name, architecture)
        if says_something and not is_known:
            yield name
    for name in ("rope_scaling", "rope_parameters"):
        yield from _unknown_of_rope(fields.raw.get(name), name, architecture)


def _unknown_of_rope(rope: Any, where: str, architecture: str) -> Iterator[str]:
    if not isinstance(rope, Mapping):
        return
    known = _ROPE | _ROPE_OF_CLASS.get(architecture, set())
    for name, value in rope.items():
        if isinstance(value, Mapping):
            yield from _unknown_of_rope(value, f"{where}.{name}", architecture)
        elif value is not None and name not in known:
            yield f"{where}.{name}"
