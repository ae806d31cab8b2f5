"""The models that are on this machine: built in, quantized here, and in the hub's own cache."""

import glob
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from localllm.card import describe_format
from localllm.catalog import BUILT_IN_MODELS, load_catalog, resolve_model
from localllm.errors import CatalogError, DiskError, LocalLLMError, RequestError
from localllm.file_times import last_use
from localllm.json_file import read_json_object
from localllm.model.weight_files import find_weight_files
from localllm.places import cache_folder


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model and its place. `last_used_s` counts from the epoch, None for a built-in one.

    `format`: how its weights are stored; `problem` says why it cannot be run as it lies there.
    """

    name: str
    repo: str | None
    folder: str
    num_bytes: int
    format: str
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
    return cache_folder("quantized")


def find_quantized(alias: str) -> Path | None:
    """The newest whole folder that `localllm quantize` made of an alias, under its own name."""
    found = [
        folder
        for folder in quantized_folder().glob(f"{glob.escape(alias)}-*")
        if folder.is_dir() and _problem(folder) is None
    ]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def _quantized_models() -> list[LocalModel]:
    """Each under the folder that it is run by; an unfinished one says so."""
    return [
        LocalModel(
            folder.name,
            None,
            str(folder),
            sum(path.stat().st_size for path in folder.glob("*") if path.is_file()),
            _format(folder),
            last_use(folder) or folder.stat().st_mtime,
            _unfinished_run(folder) or _problem(folder),
        )
        for folder in sorted(quantized_folder().glob("*"))
        if folder.is_dir()
    ]


def _built_in_model(name: str) -> LocalModel:
    folder = resolve_model(name).folder
    assert folder is not None
    num_bytes = sum(path.stat().st_size for path in folder.glob("*"))
    return LocalModel(name, None, str(folder), num_bytes, _format(folder), None, _problem(folder))


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
        folder, name = revisions[0].snapshot_path, aliases.get(repo.repo_id, repo.repo_id)
        models.append(
            LocalModel(
                name,
                repo.repo_id,
                str(folder),
                repo.size_on_disk,
                _format(folder),
                last_use(folder) or repo.last_accessed,
                _missing_weights(name, folder) or _problem(folder),
            )
        )
    unfinished = [_unfinished(place, aliases) for place in _without_snapshots(cache.repos)]
    known = [model.folder for model in unfinished]
    warnings = [str(each) for each in cache.warnings if not any(p in str(each) for p in known)]
    return LocalModels([*models, *unfinished], warnings)


def _without_snapshots(repos: Any) -> list[Path]:
    """Folders of the hub's cache in which a download has begun, and no file is complete."""
    from huggingface_hub import constants

    known = {repo.repo_path for repo in repos}
    return [
        place
        for place in Path(constants.HF_HUB_CACHE).glob("models--*--*")
        if place not in known and (place / "blobs").is_dir() and not (place / "snapshots").exists()
    ]


def _unfinished(place: Path, aliases: Mapping[str, str]) -> LocalModel:
    repo = place.name.removeprefix("models--").replace("--", "/")
    name = aliases.get(repo, repo)
    blobs = [path.stat() for path in (place / "blobs").iterdir()]
    num_bytes = sum(status.st_size for status in blobs)
    newest = max((status.st_mtime for status in blobs), default=place.stat().st_mtime)
    problem = f"unfinished; localllm pull {name} goes on"
    return LocalModel(name, repo, str(place), num_bytes, "unknown", newest, problem)


def _unfinished_run(folder: Path) -> str | None:
    return "unfinished; quantize --resume goes on" if folder.suffix == ".unfinished" else None


def _missing_weights(name: str, folder: Path) -> str | None:
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    if not (folder / "config.json").exists() or any(p.suffix in weights for p in folder.iterdir()):
        return None
    return f"its weights are not here; localllm pull {name}"


def _format(folder: Path) -> str:
    try:
        return describe_format(read_json_object(folder / "config.json"))
    except LocalLLMError:
        return "unknown"


def _problem(folder: Path) -> str | None:
    if not (folder / "config.json").exists():
        return "no config.json: not a model, or an unfinished download"
    try:
        find_weight_files(folder)
    except LocalLLMError as error:
        return error.message
    return None


@dataclass(frozen=True, slots=True)
class Removal:
    """What `rm` would delete, and what that frees."""

    name: str
    freed_bytes: int
    carry_out: Callable[[], None]


def plan_removal(name: str) -> Removal:
    """The removal of a model by the name that `find_local_models` gives it, or its repository.

    Raises: CatalogError (3) for one that is not here; RequestError for one that is built in, or a
    folder of the user's own.
    """
    if name in BUILT_IN_MODELS:
        raise RequestError(f"{name} is built in", param="model", hint="localllm ls shows others")
    for model in _quantized_models():
        if name in (model.name, model.folder):
            return Removal(model.name, model.num_bytes, partial(_remove_folder, model.folder))
    repo = resolve_model(name).repo
    if repo is None:
        raise RequestError(
            f"{name} is a folder of your own", param="model", hint="delete it yourself: rm -r"
        )
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound as error:
        raise _not_here(name) from error
    found = next((each for each in cache.repos if each.repo_id == repo), None)
    if found is None:
        for place in _without_snapshots(cache.repos):
            begun = _unfinished(place, {repo: name})
            if begun.repo == repo:
                return Removal(name, begun.num_bytes, partial(_remove_folder, begun.folder))
        raise _not_here(name)
    strategy = cache.delete_revisions(*(each.commit_hash for each in found.revisions))
    return Removal(name, strategy.expected_freed_size, partial(_remove_repository, strategy))


def _not_here(name: str) -> CatalogError:
    return CatalogError(f"{name} is not on this machine", hint="localllm ls shows what is")


def _remove_repository(strategy: Any) -> None:
    try:
        strategy.execute()
    except OSError as error:
        raise DiskError(f"it cannot be deleted: {error.strerror}") from error


def _remove_folder(folder: str) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise DiskError(f"{folder} cannot be deleted: {error.strerror}") from error
