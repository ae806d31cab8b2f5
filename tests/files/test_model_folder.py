"""A folder that is no model for localllm is told what it is, and what to do instead."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from localllm.errors import CheckpointError, UnsupportedModelError
from localllm.model.families.table import read_architecture
from localllm.model.tensor_files import read_headers
from localllm.model.weight_files import find_weight_files
from localllm.text.tokenizer_files import load_backend

ADAPTER = json.dumps({"base_model_name_or_path": "org/base", "peft_type": "LORA"})
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 12\n"


def write(folder: Path, **files: str) -> Path:
    folder.mkdir()
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


@pytest.mark.parametrize(
    ("files", "words", "hint"),
    [
        ({}, "it is empty", "the folder that has the model's files"),
        ({"adapter_config.json": ADAPTER}, "adapter (LoRA) of org/base", "localllm chat org/base"),
        (
            {"adapter_config.json": "{}"},
            "adapter (LoRA), which changes another",
            "merge_and_unload",
        ),
        (
            {"adapter_config.json": ADAPTER, "modules.json": "[]", "1_Pooling/config.json": "{}"},
            "adapter (LoRA) of org/base",
            "merge_and_unload",
        ),
        ({"model-Q4_K_M.gguf": "GGUF", "README.md": ""}, "GGUF files", "model-Q4_K_M.gguf"),
        (
            {"params.json": "{}", "consolidated.safetensors": ""},
            "Mistral's own layout",
            "config.json",
        ),
        (
            {"params.json": "{}", "consolidated.00.pth": ""},
            "Meta's or Mistral's own",
            "config.json",
        ),
        ({"pytorch_model.bin": ""}, "pickles", "safetensors"),
        ({"model.onnx": ""}, "for ONNX", "safetensors"),
        ({"tf_model.h5": ""}, "for TensorFlow", "safetensors"),
        ({"0_Transformer/config.json": "{}"}, "in the folder '0_Transformer'", "0_Transformer"),
        ({"blobs/x": "", "snapshots/y": "", "refs/main": ""}, "hub's cache", "snapshots"),
    ],
)
def test_a_folder_without_config_is_told_what_it_is(
    files: dict[str, str], words: str, hint: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", **files)
    with pytest.raises(UnsupportedModelError) as caught:
        read_architecture(folder)
    assert words in caught.value.message
    assert hint in caught.value.hint
    assert "again" not in caught.value.hint


def test_a_model_whose_config_alone_is_missing_is_no_other_layout(
    make_checkpoint: Callable[..., Path],
) -> None:
    folder = make_checkpoint()
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json is missing"):
        read_architecture(folder)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"adapter_config.json": ADAPTER, "adapter_model.safetensors": ""}, "of org/base"),
        ({"consolidated.safetensors": ""}, "Mistral's own layout"),
        ({"model-Q8_0.gguf": ""}, "GGUF files"),
        ({"pytorch_model-00001-of-00002.bin": ""}, "pickle"),
        ({"consolidated.00.pth": ""}, "pickle"),
        ({"model.onnx": "", "onnx/model_q4.onnx": ""}, "for ONNX"),
        ({"flax_model.msgpack": ""}, "for Flax"),
        ({}, "no weights here"),
    ],
)
def test_a_config_without_weights_is_told_what_is_there(
    files: dict[str, str], words: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", **{"config.json": "{}", **files})
    with pytest.raises(CheckpointError) as caught:
        find_weight_files(folder)
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("tokenizer.model", "as tokenizer.model (SentencePiece) only"),
        ("tekken.json", "as tekken.json (Mistral) only"),
        ("vocab.txt", "as vocab.txt (WordPiece) only"),
        ("tiktoken.model", "as tiktoken.model (tiktoken) only"),
    ],
)
def test_a_tokenizer_in_another_form_is_named_with_the_way_to_convert_it(
    name: str, words: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "model", **{name: ""})
    with pytest.raises(UnsupportedModelError) as caught:
        load_backend(folder)
    assert words in caught.value.message
    assert f"from_pretrained('{folder}')" in caught.value.hint


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named(name: str, make_checkpoint: Callable[..., Path]) -> None:
    folder = make_checkpoint()
    (folder / name).write_text(POINTER)
    read: dict[str, Callable[[], object]] = {
        "config.json": lambda: read_architecture(folder),
        "tokenizer.json": lambda: load_backend(folder),
        "model.safetensors": lambda: read_headers(find_weight_files(folder)),
    }
    with pytest.raises(CheckpointError, match="is a pointer of git-lfs") as caught:
        read[name]()
    assert "git lfs pull" in caught.value.hint
