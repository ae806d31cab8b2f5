"""Checkpoints that were saved without an output head: models of embeddings, and those that score
texts with a head of their own (`score.weight`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError
from localllm.model.architecture import HEAD, Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.stored_names import own_tensors
from localllm.model.tensor_files import read_headers
from localllm.model.weight_files import find_weight_files

_WITH_HEAD, _BODY, _SCORER = "ForCausalLM", "Model", "ForSequenceClassification"
# Of transformers' classes, where a config does not say.
_NUM_LABELS = 2


def class_with_head(name: str) -> str:
    """The class that writes text with the same layers."""
    for ending in (_SCORER, _BODY):
        if name.endswith(ending):
            return name.removesuffix(ending) + _WITH_HEAD
    return name


def is_body(name: str) -> bool:
    """Whether a class is the layers of another one, without a head."""
    return class_with_head(name) != name


def num_labels(name: str, raw: Mapping[str, Any], where: str) -> int:
    """Rows of the head that scores texts; 0 for a class without one. Raises: CheckpointError."""
    if not name.endswith(_SCORER):
        return 0
    labels = raw.get("id2label")
    default = len(labels) if isinstance(labels, Mapping) else _NUM_LABELS
    return ConfigFields(raw, where).integer("num_labels", 1, 1 << 16, default=default)


def lacks_head(folder: Path, architecture: Architecture) -> bool:
    """Whether the files of a model of embeddings hold no output head though its config has one."""
    if not (folder / "modules.json").exists():
        return False
    try:
        found = own_tensors(read_headers(find_weight_files(folder)), architecture)
    except CheckpointError:
        return False  # no files yet, or broken ones, which are refused when they are checked
    return not any(name.startswith(f"{HEAD}.") for name in found)
