"""Whether a model can run at all, judged by the hub's list of its files and by its config.json.

So nobody fetches gigabytes of weights of a model that cannot run.
"""

from collections.abc import Sequence
from pathlib import Path

from localllm.errors import UnsupportedModelError
from localllm.files.json_file import read_json_object
from localllm.files.model_folder import NEEDED, find_layout
from localllm.model.families.table import drafter_kind, read_architecture
from localllm.model.quantization_fields import with_quantization


def check_listed(repo: str, names: Sequence[str]) -> None:
    """Check the names of all files in a repository.

    Raises: UnsupportedModelError if no model with these files can run.
    """
    if "config.json" in names and any(name.endswith(".safetensors") for name in names):
        return
    found = find_layout(names)
    if found is not None:
        what, hint = found.what, found.hint
    else:
        what = "it has no weights" if "config.json" in names else "it has no config.json"
        hint = "check the name; its page lists the files"
    raise UnsupportedModelError(f"{repo} cannot run here: {what}", where=NEEDED, hint=hint)


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
