"""GGUF models that other programs have downloaded, by the names that people know them by.

They are read where they lie, and nothing is changed there.
"""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from localllm.files.model_file import follow_links
from localllm.hub.hub_cache import hub_cache_folder, newest_snapshot, repository_folders
from localllm.hub.ollama_store import ollama_models
from localllm.hub.quantized_files import stem_of, usual
from localllm.hub.spellings import bases_of, without_address
from localllm.hub.store_walk import StoreWalk
from localllm.hub.stored_model import LLAMA_CPP, LM_STUDIO, StoredModel, stored_models
from localllm.user.places import home_folder


def find_stored() -> list[StoredModel]:
    """The models of Ollama, LM Studio and llama.cpp, each under a name that finds it again."""
    walk = StoreWalk()
    found: dict[str, StoredModel] = {}
    for model in (*ollama_models(walk), *_models_by_folder(walk)):
        found.setdefault(_key(model.name), model)
    return [*found.values()]


def find_by_name(name: str) -> StoredModel | None:
    """The model that a name means in one of these programs; None if it means none, or several.

    A name in Ollama may lack `:latest`; one in the others its tag, its publisher and `-GGUF`, or it
    is that of the file; capitals and addresses in front do not matter.
    """
    walk, wanted = StoreWalk(), _key(name)
    keys = (wanted, f"{wanted}:latest")
    for model in ollama_models(walk, lambda each: _key(each) in keys):
        return model
    others = [*_models_by_folder(walk)]
    for model in others:
        if _key(model.name) == wanted:
            return model
    found = {model.name: model for model in others if wanted in _short_names(model)}
    names = usual(found)
    return found[names[0]] if len(names) == 1 else None


def _key(name: str) -> str:
    return without_address(name).lower()


def _short_names(model: StoredModel) -> set[str]:
    bases = bases_of(model.name)
    tag = model.name.partition(":")[2].lower()
    file = model.file.name.lower()
    return {*bases, *(f"{base}:{tag}" for base in bases), file, stem_of(file)}


def _models_by_folder(walk: StoreWalk) -> Iterator[StoredModel]:
    """The models of the programs that keep files as they are named on the hub."""
    yield from _lm_studio_models(walk)
    yield from _llama_cpp_models(walk)


def _lm_studio_models(walk: StoreWalk) -> Iterator[StoredModel]:
    for root in (Path(".lmstudio/models"), Path(".cache/lm-studio/models")):
        for publisher in walk.folders(home_folder() / root):
            for folder in walk.folders(publisher):
                base = f"{publisher.name}/{folder.name}"
                for model in stored_models(base, folder, walk.gguf(folder), LM_STUDIO):
                    # Scripts link models of other programs here.
                    yield replace(model, file=follow_links(model.file))


def _llama_cpp_models(walk: StoreWalk) -> Iterator[StoredModel]:
    chosen = os.environ.get("LLAMA_CACHE")
    caches = os.environ.get("XDG_CACHE_HOME") or home_folder() / ".cache"
    cache = Path(chosen or Path(caches) / "llama.cpp")
    # Newer versions keep them as the hub's client does, unless told otherwise in its own cache.
    if cache != hub_cache_folder():
        for repo, folder in repository_folders(cache).items():
            snapshot = newest_snapshot(folder)
            if snapshot is not None:
                yield from stored_models(repo, snapshot, walk.gguf(snapshot), LLAMA_CPP)
    files = walk.files(cache)
    sizes = {path.name: num_bytes for path, num_bytes in files.items()}
    repos = {
        "_".join(parts[1:3]): "/".join(parts[1:3])
        for parts in (path.stem.split("=") for path in files if path.suffix == ".json")
        if len(parts) == 4 and parts[0] == "manifest"
    }
    for start, repo in repos.items():
        own = {name: sizes.pop(name) for name in [*sizes] if name.startswith(f"{start}_")}
        yield from stored_models(repo, cache, own, LLAMA_CPP)
    for model in stored_models("", cache, sizes, LLAMA_CPP):
        yield replace(model, name=model.file.name)
