"""The text model within a checkpoint that has a vision tower too: its config, and its names.

The tower's weights are not read.
"""

from collections.abc import Mapping
from typing import Any

from localllm.errors import UnsupportedModelError
from localllm.model.config_fields import ConfigFields

# Classes around a text model, and the text models by their `model_type`.
_AROUND = (
    "Gemma3ForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
_TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
# What the outer config says for both.
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")


def has_tower(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a text model with a vision tower."""
    names = raw.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in _AROUND


def text_config(raw: Mapping[str, Any], where: str = "config.json") -> Mapping[str, Any]:
    """The config of the text model alone; `raw` itself where there is no tower.

    Raises: CheckpointError, UnsupportedModelError.
    """
    if not has_tower(raw):
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        ConfigFields(raw, where).fail("text_config", "an object")
    kind = text.get("model_type")
    if kind not in _TEXT_MODELS:
        raise UnsupportedModelError(
            f"the text model {kind!r:.80} is not supported; supported: {', '.join(_TEXT_MODELS)}",
            where=f"{where}: text_config",
            hint="another model, or vLLM for this one (it supports the widest set)",
        )
    shared = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    return {**shared, **text, "architectures": [_TEXT_MODELS[kind]]}
