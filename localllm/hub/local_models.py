"""The models on this machine: built in, quantized here, in the hub's cache, of other programs."""

import glob
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from localllm.errors import DownloadError, LocalLLMError
from localllm.files.file_times import last_use
from localllm.files.json_file import read_json_object
from localllm.hub.card import describe_format
from localllm.hub.catalog import BUILT_IN_MODELS, load_catalog, resolve_model
from localllm.hub.snapshot import cache_root
from localllm.hub.store_walk import StoreWalk
from localllm.hub.stored_model import StoredModel, stored_models
from localllm.hub.stores import find_stored
from localllm.model.families.table import read_architecture
from localllm.model.weight_files import find_weight_files
from localllm.user.places import cache_folder


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model and its place. `last_used_s`: seconds since the epoch, None for a built-in one.

    `format`: how its weights are stored; `problem` says why it cannot be run as it is; `program`:
    which other program has downloaded it. `folder` is the file, for one that is a GGUF file.
    """

    name: str
    repo: str | None
    folder: str
    num_bytes: int
    format: str
    last_used_s: float | None
    problem: str | None
    program: str | None = None


@dataclass(frozen=True, slots=True)
class LocalModels:
    """The models found, and warnings about what in the cache could not be read."""

    models: list[LocalModel]
    warnings: list[str]


def find_local_models() -> LocalModels:
    """Built-in models first, then those quantized here, then the hub's cache, last used first, then
    those of other programs.

    A name is the catalogue's alias if there is one. Nothing is loaded or fetched.
    """
    built_in = [_built_in_model(name) for name in BUILT_IN_MODELS]
    cached = _cached_models()
    ordered = sorted(cached.models, key=lambda model: -(model.last_used_s or 0))
    others = [_gguf_model(stored, None, stored.program) for stored in find_stored()]
    return LocalModels([*built_in, *quantized_models(), *ordered, *others], cached.warnings)


def quantized_folder() -> Path:
    """Where `localllm quantize` puts its models by default."""
    return cache_folder("quantized")


def find_quantized(alias: str) -> Path | None:
    """The newest complete folder that `localllm quantize` made of an alias, by its default name."""
    found = [
        folder
        for folder in quantized_folder().glob(f"{glob.escape(alias)}-*")
        if folder.is_dir() and _problem(folder) is None
    ]
    return max(found, key=lambda folder: folder.stat().st_mtime, default=None)


def quantized_models() -> list[LocalModel]:
    """The models quantized here, each named after its folder; an unfinished one has a `problem`."""
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


@dataclass(frozen=True, slots=True)
class CachedPlace:
    """A repository's folder in the hub's cache that the hub's client cannot interpret."""

    repo: str
    folder: Path


@dataclass(frozen=True, slots=True)
class HubCache:
    """What is in the hub's cache: `known` are the client's descriptions of models, `info` is
    everything it found, None if there is no cache.
    """

    info: Any
    known: list[Any]
    not_understood: list[CachedPlace]
    warnings: list[str]


def scan_hub_cache() -> HubCache:
    """Scan the hub's cache, without asking the hub."""
    # Imported here: the client takes half a second to import.
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache_root("a/b")  # raises where there is no home folder
        info = scan_cache_dir()
    except (CacheNotFound, DownloadError):
        return HubCache(None, [], [], [])
    known = [repo for repo in info.repos if repo.repo_type == "model" and repo.revisions]
    paths = {repo.repo_path for repo in known}
    others = [
        CachedPlace(folder.name.removeprefix("models--").replace("--", "/"), folder)
        for folder in sorted(Path(constants.HF_HUB_CACHE).glob("models--*"))
        if folder.is_dir() and folder not in paths
    ]
    warnings = [
        text
        for text in map(str, info.warnings)
        if not any(str(place.folder) in text for place in others)
    ]
    return HubCache(info, known, others, warnings)


def _cached_models() -> LocalModels:
    cache = scan_hub_cache()
    aliases = {entry.repo: alias for alias, entry in load_catalog().items()}
    models = []
    for repo in cache.known:
        revisions = sorted(repo.revisions, key=lambda revision: -revision.last_modified)
        folder, name = revisions[0].snapshot_path, aliases.get(repo.repo_id, repo.repo_id)
        gguf = stored_models(repo.repo_id, folder, StoreWalk().gguf(folder), "")
        models += [_gguf_model(stored, repo.repo_id, None) for stored in gguf]
        if gguf and not (folder / "config.json").exists():
            continue
        models.append(
            LocalModel(
                name,
                repo.repo_id,
                str(folder),
                repo.size_on_disk - sum(stored.num_bytes for stored in gguf),
                _format(folder),
                last_use(folder) or repo.last_accessed,
                _missing_weights(name, folder) or _problem(folder),
            )
        )
    unfinished = [_unfinished(place, aliases) for place in cache.not_understood]
    return LocalModels([*models, *unfinished], cache.warnings)


def _gguf_model(stored: StoredModel, repo: str | None, program: str | None) -> LocalModel:
    try:
        last_used_s = stored.file.stat().st_atime
    except OSError:  # it has just been deleted
        last_used_s = 0.0
    return LocalModel(
        stored.name,
        repo,
        str(stored.file),
        stored.num_bytes,
        stored.format,
        last_used_s,
        None,
        program,
    )


def _unfinished(place: CachedPlace, aliases: Mapping[str, str]) -> LocalModel:
    """A download that was interrupted, or that contained nothing usable."""
    name = aliases.get(place.repo, place.repo)
    blobs = [path.stat() for path in (place.folder / "blobs").glob("*")]
    num_bytes = sum(status.st_size for status in blobs)
    newest = max((status.st_mtime for status in blobs), default=place.folder.stat().st_mtime)
    problem = f"unfinished; localllm pull {name} resumes" if blobs else f"empty; localllm rm {name}"
    return LocalModel(name, place.repo, str(place.folder), num_bytes, "unknown", newest, problem)


def _unfinished_run(folder: Path) -> str | None:
    return "unfinished; quantize --resume continues" if folder.suffix == ".unfinished" else None


def _missing_weights(name: str, folder: Path) -> str | None:
    weights = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
    if not (folder / "config.json").exists() or any(p.suffix in weights for p in folder.iterdir()):
        return None
    return f"weights missing; localllm pull {name}"


def _format(folder: Path) -> str:
    try:
        return describe_format(read_json_object(folder / "config.json"))
    except LocalLLMError:
        return "unknown"


def _problem(folder: Path) -> str | None:
    if not (folder / "config.json").exists():
        return "no config.json: not a model, or an unfinished download"
    try:
        read_architecture(folder)
        find_weight_files(folder)
    except LocalLLMError as error:
        return error.message
    return None
