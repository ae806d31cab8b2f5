"""The names of the models on this machine, told from names of files in milliseconds."""

from localllm.hub.hub_cache import hub_cache_folder, newest_snapshot, repository_folders
from localllm.hub.spellings import bases_of, without_address
from localllm.hub.store_walk import StoreWalk
from localllm.hub.stored_model import stored_models
from localllm.hub.stores import find_stored
from localllm.user.places import cache_folder


def names_here() -> set[str]:
    """Those of all models but the built-in ones."""
    return fetched_names() | quantized_names() | {model.name for model in find_stored()}


def fetched_names() -> set[str]:
    """Repositories in the hub's cache, and their GGUF models by their tags."""
    walk, names = StoreWalk(), set[str]()
    for repo, folder in repository_folders(hub_cache_folder()).items():
        snapshot = newest_snapshot(folder)
        gguf = {} if snapshot is None else walk.gguf(snapshot)
        names |= {repo, *(each.name for each in stored_models(repo, folder, gguf, ""))}
    return names


def quantized_names() -> set[str]:
    """The folders that `localllm quantize` has made."""
    return {folder.name for folder in cache_folder("quantized").glob("*") if folder.is_dir()}


def with_other_tags(name: str) -> list[str]:
    """The names of models that are here and differ from `name` in their tags alone."""
    own = without_address(name).lower()
    base = own.partition(":")[0]
    return sorted(
        each
        for each in names_here()
        if ":" in each and base in bases_of(each) and without_address(each).lower() != own
    )
