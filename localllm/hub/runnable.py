"""Whether a model can run at all, by what the hub lists of it and by its config.json.

Gigabytes of weights need not be fetched to learn that it cannot.
"""

from collections.abc import Sequence
from pathlib import Path

from localllm.errors import UnsupportedModelError
from localllm.files.json_file import read_json_object
from localllm.model.families.table import read_architecture

_PICKLES = (".bin", ".pt", ".pth", ".ckpt")


def check_listed(repo: str, names: Sequence[str]) -> None:
    """Look at the names of all files of a repository.

    Raises: UnsupportedModelError where they are those of no model that runs.
    """
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return
    found = sorted({Path(name).suffix.lower() for name in names})
    if ".gguf" in found:
        what, hint = "its weights are GGUF files", "the repository that they were made from"
    elif any(suffix in _PICKLES for suffix in found):
        what, hint = "its weights are pickles, which can run code", "one with safetensors"
    elif "config.json" not in names:
        what, hint = "it has no config.json", "check the name; its page says what it holds"
    else:
        what, hint = "it has no weights", "check the name; its page says what it holds"
    raise UnsupportedModelError(
        f"{repo} cannot run here: {what}",
        where="a model is config.json, tokenizer.json and *.safetensors",
        hint=hint,
    )


def check_config(folder: Path) -> None:
    """Look at config.json. Raises: UnsupportedModelError, CheckpointError for what cannot run."""
    read_architecture(folder)
    quantization = read_json_object(folder / "config.json").get("quantization_config")
    if quantization is not None:
        # Imported here: torch, which the formats of weights need, takes two seconds.
        from localllm.model.quantization_config import read_quantization

        read_quantization(quantization)
