"""Checkpoints that were saved without an output head."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import tiny_config, write_checkpoint
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForSequenceClassification

from localllm.errors import CheckpointError
from localllm.model.families.table import read_architecture
from localllm.model.weight_check import check_weights
from localllm.model.weight_files import find_weight_files


def save_body(folder: Path, *, is_tied: bool, architecture: str | None = None) -> None:
    """The layers of a model alone, as transformers saves them."""
    config = tiny_config("Qwen3ForCausalLM", tie_word_embeddings=is_tied)
    write_checkpoint(folder / "whole", config)
    model = AutoModelForCausalLM.from_pretrained(folder / "whole", dtype=torch.float32)
    model.model.save_pretrained(folder)
    if architecture is not None:
        edit(folder, architectures=[architecture])


def edit(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_body_writes_text_only_with_the_table_as_its_head(tmp_path: Path, is_tied: bool) -> None:
    save_body(tmp_path, is_tied=is_tied)
    assert "Qwen3Model" in (tmp_path / "config.json").read_text()
    found = read_architecture(tmp_path)
    assert (found.name, found.writes_text, found.num_labels) == ("Qwen3ForCausalLM", is_tied, 0)
    check_weights(find_weight_files(tmp_path), found)


def test_a_model_of_embeddings_may_lack_the_head_that_its_config_has(tmp_path: Path) -> None:
    save_body(tmp_path, is_tied=False, architecture="Qwen3ForCausalLM")
    (tmp_path / "modules.json").write_text("[]")
    found = read_architecture(tmp_path)
    assert not found.writes_text
    check_weights(find_weight_files(tmp_path), found)


def test_any_other_model_must_have_it(tmp_path: Path) -> None:
    save_body(tmp_path, is_tied=False, architecture="Qwen3ForCausalLM")
    found = read_architecture(tmp_path)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        check_weights(find_weight_files(tmp_path), found)


@pytest.mark.parametrize("count", [1, 2, 5])  # 2 is left out of a config
def test_a_head_for_scores_is_read_with_its_labels(tmp_path: Path, count: int) -> None:
    config = Qwen3Config(**tiny_config("Qwen3ForCausalLM"), num_labels=count)
    Qwen3ForSequenceClassification(config).save_pretrained(tmp_path)
    found = read_architecture(tmp_path)
    assert (found.writes_text, found.num_labels) == (False, count)
    check_weights(find_weight_files(tmp_path), found)
    edit(tmp_path, id2label={str(i): "" for i in range(count + 1)})
    other = read_architecture(tmp_path)
    with pytest.raises(CheckpointError, match=r"score\.weight"):
        check_weights(find_weight_files(tmp_path), other)
