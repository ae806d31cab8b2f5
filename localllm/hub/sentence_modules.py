"""What a model's output goes through, as `modules.json` of sentence-transformers tells."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import CheckpointError
from localllm.files.json_file import read_json
from localllm.files.model_file import has_file


@dataclass(frozen=True, slots=True)
class SentenceModule:
    """One of them: the name of its class, and its folder in the checkpoint."""

    kind: str
    path: str


def read_modules(folder: Path) -> list[SentenceModule]:
    """In their order; none where there is no such file. Raises: CheckpointError."""
    file = folder / "modules.json"
    if not has_file(file):
        return []
    told = read_json(file)
    if not isinstance(told, list) or not all(_is_module(each) for each in told):
        raise CheckpointError(
            "modules.json must be a list of modules, each with type and path", where=str(file)
        )
    return [SentenceModule(each["type"].rpartition(".")[2], each["path"]) for each in told]


def _is_module(told: object) -> bool:
    if not isinstance(told, Mapping):
        return False
    kind, path = told.get("type"), told.get("path")
    # A folder of the checkpoint itself.
    is_inside = isinstance(path, str) and "/" not in path and ".." not in path
    return isinstance(kind, str) and is_inside
