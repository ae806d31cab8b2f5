"""Whether a model can run at all, judged by the hub's list of its files and by its config.json.

So nobody fetches gigabytes of weights of a model that cannot run.
"""

from collections.abc import Sequence
from pathlib import Path

from localllm.errors import UnsupportedModelError
from localllm.files.json_file import read_json_object
from localllm.model.families.table import drafter_kind, read_architecture
from localllm.model.quantization_fields import with_quantization

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def check_listed(repo: str, names: Sequence[str]) -> None:
    """Check the names of all files in a repository.

    Raises: UnsupportedModelError if no model with these files can run.
    """
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return
    found = sorted({Path(name).suffix.lower() for name in names})
    if ".gguf" in found:
        what, hint = "its weights are GGUF files", "the repository that they were converted from"
    elif any(suffix in _PICKLES for suffix in found):
        what, hint = "its weights are pickles, which can run code", "a repository with safetensors"
    elif "config.json" not in names:
        what, hint = "it has no config.json", "check the name; its page lists the files"
    else:
        what, hint = "it has no weights", "check the name; its page lists the files"
    raise UnsupportedModelError(
        f"{repo} cannot run here: {what}",
        where="a model needs config.json, tokenizer.json and *.safetensors",
        hint=hint,
    )


def check_config(folder: Path) -> None:
    """Check config.json, of a model or of what drafts for one.

    Raises: UnsupportedModelError, CheckpointError if it cannot run.
    """
    raw = read_json_object(folder / "config.json")
    if drafter_kind(raw) is None:
        read_architecture(folder)
    quantization = with_quantization(raw, folder).get("quantization_config")
    if quantization is not None:
        # Imported here: the weight formats need torch, which takes two seconds to import.
        from localllm.model.quantization_config import read_quantization

        read_quantization(quantization)
