"""The text model within a checkpoint that has a vision tower too: its config, and the names of its
tensors. The tower's weights are not read.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from localllm.errors import UnsupportedModelError
from localllm.model.config_fields import ConfigFields, read_token_ids

Info = TypeVar("Info")
# How the names begin there, in newer and older checkpoints, and what the text model calls them.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
    ("mtp.", "mtp."),
)
# Classes around a text model, and the text models by their `model_type`.
TOWERS = (
    "Gemma3ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",
    "Gemma4UnifiedForConditionalGeneration",
    "Mistral3ForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
TEXT_MODELS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
# What the outer config says for both, unless the text model says it itself.
_SHARED = ("dtype", "torch_dtype", "quantization_config")
# Classes around a text model whose embeddings are tied where nothing is said.
_TIED = {name for name in TOWERS if not name.startswith("Qwen")}
# Where the text model's class has other defaults than the one that computes it here.
_DEFAULTS = {"qwen3_vl_text": {"max_position_embeddings": 128000, "rope_theta": 500000.0}}


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
    own = {name: value for name, value in text.items() if name not in _SHARED or value is not None}
    shared = {name: raw[name] for name in _SHARED if raw.get(name) is not None}
    ends = [*read_token_ids(raw.get("eos_token_id"), f"{where}: eos_token_id")]
    ends += read_token_ids(text.get("eos_token_id"), f"{where}: text_config: eos_token_id")
    # Files disagree about which of the two says whether embeddings are tied; see own_head.py.
    tied = [each.get("tie_word_embeddings") for each in (raw, text)]
    return {
        **_DEFAULTS.get(kind, {}),
        **shared,
        **own,
        "architectures": [TEXT_MODELS[kind]],
        "bos_token_id": text.get("bos_token_id", raw.get("bos_token_id")),
        "eos_token_id": list(dict.fromkeys(ends)) or None,
        "tie_word_embeddings": _either(tied, raw["architectures"][0] in _TIED),
    }


def _either(flags: list[Any], default: bool) -> Any:
    """True if one of the flags is, else the first that is given, else `default`."""
    given = [flag for flag in flags if flag is not None] or [default]
    return True if True in given else given[0]


def text_tensors(found: Mapping[str, Info]) -> dict[str, Info]:
    """The tensors of the text model by its own names; those of the tower are left out."""
    own = {}
    for name, info in found.items():
        for prefix, replacement in _PREFIXES:
            if name.startswith(prefix):
                own[replacement + name.removeprefix(prefix)] = info
                break
    return own
