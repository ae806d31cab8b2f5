"""Fields that files call by several names.

transformers keeps such a name for each class that had another one before, and writes only one of
them. Source: `attribute_map` and `__post_init__` of the config classes of transformers 5.24
(`tests/model/test_written_configs.py` compares them).
"""

from collections.abc import Mapping
from typing import Any

# Of layers.
_OLDER_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}
_ROUTED = {"n_routed_experts": ("n_routed_experts", "num_local_experts")}
_LFM2 = {
    "rms_norm_eps": ("norm_eps", "rms_norm_eps"),
    "tie_word_embeddings": ("tie_embedding", "tie_word_embeddings"),
}
# By class and by the name that its reader knows: the names in files, the one that counts first.
_ALIASES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "DeepseekV2ForCausalLM": {"n_routed_experts": ("n_routed_experts", "num_experts")},
    "DeepseekV3ForCausalLM": _ROUTED,
    "Glm4MoeForCausalLM": _ROUTED,
    "Glm4MoeLiteForCausalLM": {**_ROUTED, "qk_rope_head_dim": ("qk_rope_head_dim", "head_dim")},
    "GptOssForCausalLM": {"num_local_experts": ("num_local_experts", "num_experts")},
    "GraniteMoeHybridForCausalLM": {"layer_types": ("layer_types", "layers_block_type")},
    "Lfm2ForCausalLM": {**_LFM2, "intermediate_size": ("block_ff_dim", "intermediate_size")},
    "Lfm2MoeForCausalLM": _LFM2,
    "Lfm3ForCausalLM": _LFM2,
    "MixtralForCausalLM": {"num_local_experts": ("num_local_experts", "num_experts")},
    "NemotronHForCausalLM": {
        **_ROUTED,
        "conv_kernel": ("mamba_d_conv", "conv_kernel"),
        "n_groups": ("mamba_n_groups", "n_groups"),
        "time_step_limit": ("mamba_dt_limit", "time_step_limit"),
        "use_conv_bias": ("mamba_conv_bias", "use_conv_bias"),
    },
    "OlmoeForCausalLM": {"num_experts": ("num_experts", "num_local_experts")},
    "Qwen3MoeForCausalLM": {"num_experts": ("num_local_experts", "num_experts")},
}


def with_known_names(raw: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """The fields by the names that the reader of a class knows."""
    aliases = _ALIASES.get(architecture, {})
    others = {name for names in aliases.values() for name in names}
    fields = {name: value for name, value in raw.items() if name not in others}
    for known, names in aliases.items():
        given = [name for name in names if name in raw]
        said = [name for name in given if raw[name] is not None]
        if given:
            fields[known] = raw[(said or given)[0]]
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        fields["layer_types"] = [_OLDER_KINDS.get(str(each), each) for each in kinds]
    return fields
