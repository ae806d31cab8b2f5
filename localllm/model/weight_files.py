"""Which files of a checkpoint folder hold its weights, and a fingerprint of them."""

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError
from localllm.files.json_file import MAX_JSON_BYTES, read_json_object
from localllm.files.model_file import has_file, open_model_file, read_model_file
from localllm.files.model_folder import PICKLES, no_weights
from localllm.user.places import cache_places

# Mistral's own layout of the same weights; the weights of an adapter.
_OTHERS = ("consolidated", "adapter_model")
# What stands in a folder that stands for a GGUF model, and the cache where such folders are.
GGUF_NAME, GGUF_FOLDERS = "gguf.json", "gguf"
INDEX_NAME = "model.safetensors.index.json"
# 200 bytes for each of the tensors that a checkpoint may have.
MAX_INDEX_BYTES = 20_000_000
# How a weight file is sampled for its fingerprint.
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 1 << 12


def is_gguf_folder(folder: Path) -> bool:
    """Whether a folder is one of our own that stands for a GGUF model."""
    return folder.parent in cache_places(GGUF_FOLDERS)


def find_weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, from its index if it has one; the GGUF files
    that a folder of our own stands for, see hub/gguf_folder.py.

    Raises: CheckpointError where there are none, where a shard of the index is missing, or where a
    GGUF file is not the one that the folder was made from.
    """
    if is_gguf_folder(folder):
        return [_as_it_was(each) for each in read_json_object(folder / GGUF_NAME)["files"]]
    index = folder / INDEX_NAME
    if has_file(index):
        return [folder / name for name in sorted(set(_read_weight_map(index).values()))]
    # Some repositories hold a second copy of the weights under another name.
    whole = folder / "model.safetensors"
    files = [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))
    files = [path for path in files if not path.name.startswith(_OTHERS)]
    if files:
        return files
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
    if pickled:
        raise CheckpointError(
            f"the weights are a pickle ({pickled[0]}), which can run code when it is loaded",
            where=str(folder),
            hint="convert them to safetensors (github.com/huggingface/safetensors, "
            "bindings/python/convert.py) or use a repository that has them",
        )
    raise no_weights(folder)


def _as_it_was(file: Mapping[str, Any]) -> Path:
    """The path of a GGUF file that is still the same, or is gone, as whoever opens it says."""
    path = Path(file["path"])
    with suppress(OSError):
        status = path.stat()
        if (status.st_size, status.st_mtime_ns) != (file["num_bytes"], file["mtime_ns"]):
            raise CheckpointError(
                f"{path.name} was replaced while it was opened",
                where=str(path),
                hint="the same command again, once the file is complete",
            )
    return path


def fingerprint(folder: Path, files: list[Path]) -> str:
    """A fingerprint of a checkpoint's config and weight files.

    A file is identified by its size, its start (which holds names, shapes and offsets of its
    tensors) and samples of the rest, which takes milliseconds. Further training changes the weights
    almost everywhere, but the last tensor may be a norm that stays the same. Raises: as
    `open_model_file`.
    """
    digest = hashlib.sha256(read_model_file(folder / "config.json", MAX_JSON_BYTES))
    for path in files:
        with open_model_file(path) as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name} {size}".encode() + file.read(1 << 16))
            for i in range(1, _NUM_SAMPLES + 1):
                file.seek(max(0, size * i // _NUM_SAMPLES - _SAMPLE_BYTES))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index, MAX_INDEX_BYTES).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index.name} has no weight_map", where=str(index))
    for name in sorted({str(value) for value in weight_map.values()}):
        is_plain = name.isprintable() and Path(name).name == name
        if not is_plain or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"{index.name} points outside the folder: {name!r:.100}", where=str(index)
            )
        if not os.path.exists(index.parent / name):  # also false for a name that is too long
            first = next(tensor for tensor, file in weight_map.items() if file == name)
            raise CheckpointError(
                f"shard {name:.100} is missing; it holds {first!r:.100} and others",
                where=str(index),
                hint="download the model again",
            )
    return weight_map
