"""The families by the architecture name in config.json, and the reading of one."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from localllm.errors import UnsupportedModelError, brief
from localllm.files.json_file import read_json_object
from localllm.model.architecture import Architecture
from localllm.model.config_fields import OTHER_ENGINE, ConfigFields, plain_floats
from localllm.model.families.aliases import with_known_names
from localllm.model.families.cohere2 import read_cohere2
from localllm.model.families.deepseek import read_deepseek_v2, read_deepseek_v3
from localllm.model.families.defaults import CLASS_DEFAULTS
from localllm.model.families.ernie45 import read_ernie45
from localllm.model.families.exaone4 import read_exaone4
from localllm.model.families.gemma2 import read_gemma2
from localllm.model.families.gemma3 import read_gemma3
from localllm.model.families.gemma4 import read_gemma4
from localllm.model.families.glm4 import read_glm4
from localllm.model.families.glm4_moe import read_glm4_moe
from localllm.model.families.glm4_moe_lite import read_glm4_moe_lite
from localllm.model.families.gpt_oss import read_gpt_oss
from localllm.model.families.granite import read_granite, read_granite4, read_granite_moe
from localllm.model.families.hunyuan import read_hunyuan
from localllm.model.families.known_fields import unknown_fields
from localllm.model.families.lfm2 import read_lfm2, read_lfm2_moe
from localllm.model.families.lfm3 import read_lfm3
from localllm.model.families.llama import read_llama
from localllm.model.families.ministral3 import read_ministral3
from localllm.model.families.mistral import read_mistral
from localllm.model.families.mixtral import read_mixtral
from localllm.model.families.nemotron_h import read_nemotron_h
from localllm.model.families.olmo2 import read_olmo2
from localllm.model.families.olmo3 import read_olmo3
from localllm.model.families.olmo_hybrid import read_olmo_hybrid
from localllm.model.families.olmoe import read_olmoe
from localllm.model.families.phi3 import read_phi3
from localllm.model.families.qwen2 import read_qwen2
from localllm.model.families.qwen3 import read_qwen3
from localllm.model.families.qwen3_5 import (
    read_qwen3_5,
    read_qwen3_5_moe,
    read_qwen3_next,
)
from localllm.model.families.qwen_moe import read_qwen2_moe, read_qwen3_moe
from localllm.model.families.seed_oss import read_seed_oss
from localllm.model.families.smollm3 import read_smollm3
from localllm.model.headless import class_with_head, is_body, lacks_head, num_labels
from localllm.model.own_head import has_other_head
from localllm.model.quantization_fields import check_quantization_fields, with_quantization
from localllm.model.size_limits import check_sizes
from localllm.model.tower import has_tower, text_config

logger = logging.getLogger(__name__)

DrafterKind = Literal["eagle", "draft"]

FAMILIES: dict[str, Callable[[ConfigFields], Architecture]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
    "Cohere2ForCausalLM": read_cohere2,
    "DeepseekV2ForCausalLM": read_deepseek_v2,
    "DeepseekV3ForCausalLM": read_deepseek_v3,
    "Ernie4_5ForCausalLM": read_ernie45,
    "Exaone4ForCausalLM": read_exaone4,
    "Gemma2ForCausalLM": read_gemma2,
    "Gemma3ForCausalLM": read_gemma3,
    "Gemma4ForCausalLM": read_gemma4,
    "Gemma4UnifiedForCausalLM": read_gemma4,
    "Glm4ForCausalLM": read_glm4,
    "Glm4MoeForCausalLM": read_glm4_moe,
    "Glm4MoeLiteForCausalLM": read_glm4_moe_lite,
    "GraniteForCausalLM": read_granite,
    "GptOssForCausalLM": read_gpt_oss,
    "GraniteMoeForCausalLM": read_granite_moe,
    "GraniteMoeHybridForCausalLM": read_granite4,
    "HunYuanDenseV1ForCausalLM": read_hunyuan,
    "Lfm2ForCausalLM": read_lfm2,
    "Lfm2MoeForCausalLM": read_lfm2_moe,
    "Lfm3ForCausalLM": read_lfm3,
    "Ministral3ForCausalLM": read_ministral3,
    "MixtralForCausalLM": read_mixtral,
    "NemotronHForCausalLM": read_nemotron_h,
    "Olmo2ForCausalLM": read_olmo2,
    "Olmo3ForCausalLM": read_olmo3,
    "OlmoHybridForCausalLM": read_olmo_hybrid,
    "OlmoeForCausalLM": read_olmoe,
    "Phi3ForCausalLM": read_phi3,
    "Qwen2MoeForCausalLM": read_qwen2_moe,
    "Qwen3MoeForCausalLM": read_qwen3_moe,
    "Qwen3NextForCausalLM": read_qwen3_next,
    "Qwen3_5ForCausalLM": read_qwen3_5,
    "Qwen3_5MoeForCausalLM": read_qwen3_5_moe,
    "SeedOssForCausalLM": read_seed_oss,
    "SmolLM3ForCausalLM": read_smollm3,
}


def drafter_kind(raw: Mapping[str, Any]) -> DrafterKind | None:
    """What a config.json describes if that is no model, but drafts for one: a head, see eagle.py,
    of which the oldest ones say that they are a Llama, or an assistant, see assistant.py.
    """
    names = raw.get("architectures")
    first = names[0] if isinstance(names, list) and names else None
    name = first if isinstance(first, str) else ""
    if "speculators_model_type" in raw or "Eagle" in name:
        return "eagle"
    return "draft" if name.startswith("Gemma4") and "Assistant" in name else None


def architecture_of(raw: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """The architecture that a config.json describes.

    Raises: CheckpointError naming the field and the range it must lie in; UnsupportedModelError.
    """
    kind = drafter_kind(raw)
    if kind is not None:
        what = "a head" if kind == "eagle" else "an assistant"
        raise UnsupportedModelError(
            f"this is not a model, but {what} that drafts for one",
            where=where,
            hint=f"localllm chat MODEL --spec {kind}:NAME, with the name of this one",
        )
    given = text_config(raw, where)
    stored = ConfigFields(given, where).architecture()
    name = stored if stored in FAMILIES else class_with_head(stored)
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {stored!r:.80} is not supported",
            where=where,
            hint=OTHER_ENGINE,
        )
    known = with_known_names(plain_floats(given), name)
    fields = ConfigFields({**CLASS_DEFAULTS.get(name, {}), **known, "architectures": [name]}, where)
    architecture = FAMILIES[name](fields)
    if given.get("per_layer_config") and "per_layer_config" not in fields.read:
        fields.refuse("sizes of their own for some layers (per_layer_config) are")
    unknown = tuple(unknown_fields(ConfigFields(known, where, fields.read), name))
    unknown += check_quantization_fields(architecture.quantization)
    check_sizes(architecture, where)
    architecture = replace(architecture, has_tower=has_tower(raw), unknown_fields=unknown)
    labels = num_labels(stored, given, where)
    if labels or (is_body(stored) and not architecture.tie_word_embeddings):
        return replace(_without_head(architecture), num_labels=labels)
    return architecture


def read_architecture(folder: Path) -> Architecture:
    """The architecture of a checkpoint; its code is never run. Raises: as `architecture_of`."""
    path = folder / "config.json"
    raw = with_quantization(read_json_object(path), folder)
    architecture = architecture_of(raw, str(path))
    if architecture.tie_word_embeddings and has_other_head(folder, architecture):
        architecture = replace(architecture, tie_word_embeddings=False)
    elif not architecture.tie_word_embeddings and lacks_head(folder, architecture):
        architecture = _without_head(architecture)
    if architecture.unknown_fields:
        names = ", ".join(brief(name) for name in architecture.unknown_fields[:8])
        logger.warning("%s: fields that localllm does not know are ignored: %s", path, names)
    if "auto_map" in raw:
        name = architecture.name
        logger.warning("code in the model's folder is not run; the built-in %s is used", name)
    return architecture


def _without_head(architecture: Architecture) -> Architecture:
    # Its logits mean nothing; those of the embedding table cost no memory.
    return replace(architecture, tie_word_embeddings=True, writes_text=False)
