"""Checkpoints with a head that drafts, with random weights, for tests."""

from pathlib import Path
from typing import Any

import torch
from checkpoints import random_values, stacked, write_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm.model.decoder import DecoderModel
from localllm.model.families.table import architecture_of
from localllm.model.mtp import find_mtp, mtp_architecture
from localllm.model.weight_files import find_weight_files
from localllm.model.weights import load_head, open_source

# Beginnings of names: the loader's, and those of files where the head stands apart.
APART = {
    "model.join_embedding_norm.": "mtp.pre_fc_norm_embedding.",
    "model.join_hidden_norm.": "mtp.pre_fc_norm_hidden.",
    "model.join.": "mtp.fc.",
    "model.norm.": "mtp.norm.",
    "model.layers.0.": "mtp.layers.0.",
    "model.drafted": "mtp.token_ids",
    "lm_head.": "mtp.lm_head.",
}


def behind(number: int) -> dict[str, str]:
    """The same where it is a further layer of the model."""
    layer = f"model.layers.{number}."
    return {
        "model.join_embedding_norm.": f"{layer}enorm.",
        "model.join_hidden_norm.": f"{layer}hnorm.",
        "model.join.": f"{layer}eh_proj.",
        "model.norm.": f"{layer}shared_head.norm.",
        "model.layers.0.": layer,
    }


def head_architecture(config: dict[str, Any]) -> Architecture:
    """That of a head that shares its target's output head."""
    architecture = mtp_architecture(architecture_of(config), {})
    assert architecture is not None
    return architecture


def write_with_head(
    folder: Path, config: dict[str, Any], names: dict[str, str] = APART, seed: int = 0
) -> dict[str, Tensor]:
    """A checkpoint whose files hold a head too; returns the head's tensors by the loader's names,
    before those of experts are stacked.
    """
    write_checkpoint(folder, config, seed=seed)
    architecture = head_architecture(config)
    generator = torch.Generator().manual_seed(seed + 1)
    tensors = {
        name: random_values(name, shape, generator)
        for name, shape in architecture.tensors().items()
    }
    found = load_file(folder / "model.safetensors")
    for name, values in stacked(tensors, architecture).items():
        for own, stored in names.items():
            if name.startswith(own):
                found[stored + name.removeprefix(own)] = values.contiguous()
                break
        else:
            raise AssertionError(name)
    save_file(found, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def load_own_head(folder: Path, target: DecoderModel) -> DecoderModel:
    """The head in a checkpoint's own files."""
    found = find_mtp(find_weight_files(folder), target.architecture)
    assert found is not None
    architecture, weights = found
    with open_source(weights) as source:
        return load_head(source, architecture, target, target.embedding.table.dtype)
