"""GGUF files as what `quantize` reads: the tensors of the checkpoint that they were made from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import random_tensors
from gguf_files import converted, write_gguf
from gguf_models import GGUF_MODELS

from localllm.errors import UnsupportedModelError
from localllm.files.gguf import read_gguf
from localllm.model.architecture import Architecture
from localllm.model.families.table import architecture_of
from localllm.model.gguf.config import config_of
from localllm.model.weight_check import WeightMap
from localllm.model.weights import open_source
from localllm.quantize.gguf_source import read_gguf_source


def source_of(path: Path) -> tuple[Architecture, WeightMap]:
    config = config_of(read_gguf(path))
    return read_gguf_source(architecture_of(config), [path], config)


def written(path: Path, name: str, **options: Any) -> Path:
    model = GGUF_MODELS[name]
    return write_gguf(path, model, converted(model, random_tensors(model.config)), **options)


@pytest.mark.parametrize("name", ["llama", "granite", "glm4", "gemma3", "qwen2", "cohere2"])
def test_its_tensors_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    """Of families whose files hold queries and keys in another order, norms plus 1, or neither."""
    config = GGUF_MODELS[name].config
    architecture, weights = source_of(written(tmp_path / "model.gguf", name))
    own = architecture_of(config)
    assert architecture.layers[0].places[0].block == own.layers[0].places[0].block
    tensors = random_tensors(config)
    with open_source(weights) as source:
        for key in weights.plain:
            found, expected = source.plain(key).float(), tensors[key].float()
            exact = key not in own.tensors() or not key.endswith("norm.weight")
            torch.testing.assert_close(found, expected, atol=0 if exact else 1e-6, rtol=0)


def test_fewer_bits_than_eight_are_refused(tmp_path: Path) -> None:
    source_of(written(tmp_path / "eight.gguf", "llama", matrices="Q8_0"))
    with pytest.raises(UnsupportedModelError, match=r"less than 8 bits already \(Q4_0\)"):
        source_of(written(tmp_path / "four.gguf", "llama", matrices="Q4_0"))


@pytest.mark.parametrize("name", ["qwen35", "deepseek2, v3"])
def test_tensors_in_other_groups_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="in other groups"):
        source_of(written(tmp_path / "model.gguf", name))
