"""The families by the name that a config.json gives, and what is read from one."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from localllm.errors import UnsupportedModelError
from localllm.files.json_file import read_json_object
from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.llama import read_llama
from localllm.model.families.mistral import read_mistral
from localllm.model.families.qwen2 import read_qwen2
from localllm.model.families.qwen3 import read_qwen3

logger = logging.getLogger(__name__)

FAMILIES: dict[str, Callable[[ConfigFields], Architecture]] = {
    "LlamaForCausalLM": read_llama,
    "MistralForCausalLM": read_mistral,
    "Qwen2ForCausalLM": read_qwen2,
    "Qwen3ForCausalLM": read_qwen3,
}


def architecture_of(raw: Mapping[str, Any], where: str = "config.json") -> Architecture:
    """What a config.json describes.

    Raises: CheckpointError naming the field and the range it must lie in; UnsupportedModelError
    naming the architectures that are supported.
    """
    fields = ConfigFields(raw, where)
    name = fields.architecture()
    if name not in FAMILIES:
        raise UnsupportedModelError(
            f"architecture {name!r:.80} is not supported; supported: {', '.join(FAMILIES)}",
            where=where,
            hint="another model, or vLLM for this one (it supports the widest set)",
        )
    return FAMILIES[name](fields)


def read_architecture(folder: Path) -> Architecture:
    """What the checkpoint in `folder` is; code in it is never run. Raises: as `architecture_of`."""
    path = folder / "config.json"
    raw = read_json_object(path)
    architecture = architecture_of(raw, str(path))
    if "auto_map" in raw:
        name = architecture.name
        logger.warning("code in the model's folder is not run; the built-in %s is used", name)
    return architecture
