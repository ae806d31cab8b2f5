"""The configs of transformers' classes, by the class that computes the model."""

from typing import Any

from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from localllm.model.families.table import FAMILIES

# By class, the name of its own config: other configs may load the same class.
KINDS = {
    name: kind
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    if name in FAMILIES and CONFIG_MAPPING_NAMES[kind] == name.replace("ForCausalLM", "Config")
} | {
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma4ForCausalLM": "gemma4_text",
    "Gemma4UnifiedForCausalLM": "gemma4_unified_text",
    "Qwen3_5ForCausalLM": "qwen3_5_text",
    "Qwen3_5MoeForCausalLM": "qwen3_5_moe_text",
}
# A checkpoint without experts and Mamba says so.
SAID: dict[str, dict[str, Any]] = {
    "HunYuanDenseV1ForCausalLM": {"num_hidden_layers": 32},
    # 96 heads do not divide the default width.
    "Glm4MoeForCausalLM": {"head_dim": 128},
    # The class has no default.
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
}
# End tokens may stand in other files, so that a class' own are not taken.
LEFT = {"eos_token_id": None, "dtype": "bfloat16"}


def whole_config(family: str, **said: Any) -> dict[str, Any]:
    """config.json with every field, as transformers completes it."""
    config: dict[str, Any] = CONFIG_MAPPING[KINDS[family]](**said).to_dict()
    return {**config, **LEFT, "architectures": [family]}
