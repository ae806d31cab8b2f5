"""What a folder or a repository is that lacks a file which every model here needs.

Most such folders are sound, and meant for another program: "download it again" would help nobody.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import CheckpointError, UnsupportedModelError, brief
from localllm.files.regular_file import read_regular

NEEDED = "a model needs config.json, tokenizer.json and *.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_ADAPTER = "adapter_config.json"
_MAX_BYTES = 1_000_000
_CONVERT = (
    'python -c "from transformers import AutoTokenizer as T; '
    "T.from_pretrained('{0}').save_pretrained('{0}')\""
)
# Files of a tokenizer in another form, and what that is called.
_TOKENIZERS = {
    "tokenizer.model": "SentencePiece",
    "spiece.model": "SentencePiece",
    "tekken.json": "Mistral",
    "tiktoken.model": "tiktoken",
    "merges.txt": "vocab.json and merges",
    "vocab.txt": "WordPiece",
}
_OTHER_WEIGHTS = {
    ".onnx": "ONNX",
    ".h5": "TensorFlow",
    ".msgpack": "Flax",
    ".npz": "NumPy",
    ".mlmodelc": "Core ML",
}


@dataclass(frozen=True, slots=True)
class OtherLayout:
    """What the files are, as the end of a sentence that begins with "it"; and the next step."""

    what: str
    hint: str


def find_layout(names: Collection[str], folder: Path = Path()) -> OtherLayout | None:
    """What files with these names (paths below `folder`) are if they are no model for localllm;
    None if their names do not tell.
    """
    top = {name.partition("/")[0] for name in names}
    endings = {Path(name).suffix.lower() for name in names}
    if _ADAPTER in top:
        hint = "that model; or one made of both: peft's merge_and_unload, then save_pretrained"
        return OtherLayout("it is an adapter (LoRA), which changes another model", hint)
    if {"blobs", "snapshots"} <= top:
        hint = "the folder of a revision in its folder snapshots"
        return OtherLayout("it is a repository in the hub's cache", hint)
    if "params.json" in top and any(name.startswith("consolidated") for name in top):
        hint = "the files in the layout of transformers: config.json and model*.safetensors"
        return OtherLayout(
            "it has Meta's or Mistral's own layout (params.json, consolidated*)", hint
        )
    if ".gguf" in endings:
        files = [name for name in names if name.lower().endswith(".gguf")]
        # Not the part for pictures, where there is a model.
        first = min(files, key=lambda name: ("mmproj" in name.lower(), name))
        return OtherLayout(
            "its weights are GGUF files", f"the path of one of them: {folder / first}"
        )
    if any(suffix in PICKLES for suffix in endings):
        hint = "a repository with safetensors"
        return OtherLayout("its weights are pickles, which can run code", hint)
    for suffix, kind in _OTHER_WEIGHTS.items():
        if suffix in endings:
            return OtherLayout(f"its weights are for {kind}", "a repository with safetensors")
    return None


def explain_missing(path: Path) -> CheckpointError | None:
    """The error for a file that a folder lacks, by what else is there; None for a file that not
    every model needs.
    """
    folder = path.parent
    try:
        names = _names_in(folder)
        inner = [name for name in names if (folder / name / path.name).is_file()]
    except OSError:
        return None
    if path.name == "tokenizer.json":
        return _without_tokenizer(folder, names)
    if path.name != "config.json":
        return None
    if not names:
        what = "its links lead nowhere" if any(folder.iterdir()) else "it is empty"
        return _cannot_run(folder, what, "the folder that has the model's files")
    if _ADAPTER in names:
        return _adapter(folder)
    layout = find_layout([*names, *(f"{name}/" for name in names)], folder)
    if layout is None and inner:
        what = f"its model is in the folder {inner[0]!r:.80}"
        return _cannot_run(folder, what, str(folder / inner[0]))
    if layout is not None:
        return _cannot_run(folder, layout.what, layout.hint)
    return CheckpointError(
        "config.json is missing",
        where=f"{folder}: {NEEDED}",
        hint="the model's page, which has it beside the weights; or another folder",
    )


def no_weights(folder: Path) -> CheckpointError:
    """The error for a folder whose config.json has no weights beside it."""
    names = _names_in(folder)
    if any(name.startswith("adapter_model") for name in names) and _ADAPTER in names:
        return _adapter(folder)
    layout = find_layout([name for name in names if name != _ADAPTER], folder)
    if layout is None and any(name.startswith("consolidated") for name in names):
        what = "its weights are in Mistral's own layout (consolidated.safetensors)"
        layout = OtherLayout(what, "the repository's model*.safetensors")
    if layout is not None:
        return _cannot_run(folder, layout.what, layout.hint)
    return CheckpointError(
        "no weights here: no *.safetensors file",
        where=str(folder),
        hint="the rest of the download (localllm pull MODEL), or another folder",
    )


def _names_in(folder: Path) -> list[str]:
    """The names in a folder but for links to nothing."""
    return sorted(each.name for each in folder.iterdir() if each.exists())


def _adapter(folder: Path) -> CheckpointError:
    """An adapter, with the name of its model if its file tells."""
    try:
        base = json.loads(read_regular(folder / _ADAPTER, _MAX_BYTES))["base_model_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        base = None
    found = find_layout([_ADAPTER])
    assert found is not None
    if not isinstance(base, str) or not base:
        return _cannot_run(folder, found.what, found.hint)
    name = base if re.fullmatch(r"[\w./@-]{1,200}", base) else brief(base)
    what = f"it is an adapter (LoRA) of {name}, which is not supported yet"
    return _cannot_run(folder, what, found.hint.replace("that model", f"localllm chat {name}", 1))


def _without_tokenizer(folder: Path, names: Collection[str]) -> CheckpointError:
    kind = next((each for each in _TOKENIZERS if each in names), None)
    if kind is None:
        hint = "tokenizer.json of the model's page, or of the model that it was trained from"
        return CheckpointError("tokenizer.json is missing", where=str(folder), hint=hint)
    return UnsupportedModelError(
        f"tokenizer.json is missing; the tokenizer is here as {kind} ({_TOKENIZERS[kind]}) only",
        where=str(folder),
        hint=f"convert it once: {_CONVERT.format(folder)}",
    )


def _cannot_run(folder: Path, what: str, hint: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{folder.name or folder} cannot run here: {what}", where=f"{folder}: {NEEDED}", hint=hint
    )
