"""The models that are on this machine: built in, quantized here, and in the hub's own cache."""

from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from localllm.catalog import BUILT_IN_MODELS, load_catalog, resolve_model
from localllm.errors import LocalLLMError
from localllm.model.weight_files import find_weight_files


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model and its place. `last_used_s` counts from the epoch, None for a built-in one.

    `problem` says why it cannot be run as it lies there.
    """

    name: str
    repo: str | None
    folder: str
    num_bytes: int
    last_used_s: float | None
    problem: str | None


@dataclass(frozen=True, slots=True)
class LocalModels:
    """What was found, and what in the cache could not be understood."""

    models: list[LocalModel]
    warnings: list[str]


def find_local_models() -> LocalModels:
    """Built-in models first, then those quantized here, then the hub's cache, last used first.

    A name is the catalogue's alias where there is one. Nothing is loaded or fetched.
    """
    built_in = [_built_in_model(name) for name in BUILT_IN_MODELS]
    cached = _cached_models()
    ordered = sorted(cached.models, key=lambda model: -(model.last_used_s or 0))
    return LocalModels([*built_in, *_quantized_models(), *ordered], cached.warnings)


def quantized_folder() -> Path:
    """Where `localllm quantize` puts what it makes, unless it is told another place."""
    return user_cache_path("localllm") / "quantized"


def _quantized_models() -> list[LocalModel]:
    """Each under the folder that it is run by; an unfinished one says so."""
    return [
        LocalModel(
            str(folder),
            None,
            str(folder),
            sum(path.stat().st_size for path in folder.glob("*") if path.is_file()),
            folder.stat().st_mtime,
            _problem(folder),
        )
        for folder in sorted(quantized_folder().glob("*"))
        if folder.is_dir()
    ]


def _built_in_model(name: str) -> LocalModel:
    folder = resolve_model(name).folder
    assert folder is not None
    num_bytes = sum(path.stat().st_size for path in folder.glob("*"))
    return LocalModel(name, None, str(folder), num_bytes, None, _problem(folder))


def _cached_models() -> LocalModels:
    # Imported here: the client takes half a second.
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return LocalModels([], [])
    aliases = {entry.repo: alias for alias, entry in load_catalog().items()}
    models = []
    for repo in cache.repos:
        revisions = sorted(repo.revisions, key=lambda revision: -revision.last_modified)
        if repo.repo_type != "model" or not revisions:
            continue
        folder = revisions[0].snapshot_path
        models.append(
            LocalModel(
                aliases.get(repo.repo_id, repo.repo_id),
                repo.repo_id,
                str(folder),
                repo.size_on_disk,
                repo.last_accessed,
                _problem(folder),
            )
        )
    return LocalModels(models, [str(warning) for warning in cache.warnings])


def _problem(folder: Path) -> str | None:
    if not (folder / "config.json").exists():
        return "no config.json: not a model, or an unfinished download"
    try:
        find_weight_files(folder)
    except LocalLLMError as error:
        return error.message
    return None
