"""The text model within a checkpoint that has a vision tower too: its config, and the names of its
tensors. The tower's weights are not read.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from localllm.errors import UnsupportedModelError
from localllm.model.config_fields import ConfigFields

Info = TypeVar("Info")
# How the names begin there, in newer and older checkpoints, and what the text model calls them.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)
# Classes around a text model, and the text models by their `model_type`.
TOWERS = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
)
TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
# What the outer config says for both.
_SHARED = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")


def has_tower(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json describes a text model with a vision tower."""
    names = raw.get("architectures")
    return isinstance(names, list) and bool(names) and names[0] in TOWERS


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
    if kind not in TEXT_MODELS:
        raise UnsupportedModelError(
            f"the text model {kind!r:.80} is not supported; supported: {', '.join(TEXT_MODELS)}",
            where=f"{where}: text_config",
            hint="another model, or vLLM for this one (it supports the widest set)",
        )
    shared = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    return {**shared, **text, "architectures": [TEXT_MODELS[kind]]}


def text_tensors(found: Mapping[str, Info]) -> dict[str, Info]:
    """The tensors of the text model by its own names; those of the tower are left out."""
    own = {}
    for name, info in found.items():
        for prefix, replacement in _PREFIXES:
            if name.startswith(prefix):
                own[replacement + name.removeprefix(prefix)] = info
                break
    return own
