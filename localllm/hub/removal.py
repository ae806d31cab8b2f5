"""`rm`: what deleting a model removes, planned beforehand and verified afterwards."""

import os
import shlex
import shutil
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from localllm.errors import CatalogError, DiskError, ExitCode, RequestError
from localllm.hub.catalog import BUILT_IN_MODELS, ModelSource, load_catalog, resolve_model
from localllm.hub.local_models import quantized_models, scan_hub_cache
from localllm.hub.quantized_files import choose
from localllm.hub.store_walk import StoreWalk
from localllm.hub.stored_model import OLLAMA
from localllm.hub.stores import find_by_name


@dataclass(frozen=True, slots=True)
class Removal:
    """What `rm` deletes for one name: `folders` and everything in them, or files; and nothing else
    but blobs that no other revision uses.

    `what` describes it to the user: a repository, or one revision or file of it.
    """

    name: str
    what: str
    folders: tuple[Path, ...]
    freed_bytes: int
    delete: Callable[[], None]

    def carry_out(self) -> None:
        """Delete and verify. Raises: DiskError if any of it is still there."""
        try:
            self.delete()
        except OSError as error:
            raise self._incomplete(error.strerror or str(error)) from error
        if any(folder.exists() for folder in self.folders):  # the hub's client only logs a failure
            raise self._incomplete("permission denied, or in use")

    def _incomplete(self, reason: str) -> DiskError:
        left = [folder for folder in self.folders if folder.exists()]
        return DiskError(
            f"{self.name} is not deleted: {reason}",
            where=f"{_size_of(left):,} bytes are left in {', '.join(map(str, left))}",
            hint="the owner of that folder can delete it",
        )


def plan_removals(names: Iterable[str]) -> list[Removal]:
    """Plan the removal of models, by the names that `ls` gives them or by repository; a model that
    is named twice is deleted once. `org/name@revision` is that revision alone, and
    `org/name:tag` that GGUF model.

    Raises: CatalogError (3) for a model that is not here; RequestError for a built-in model, what
    another program has downloaded, or a folder or a file of the user's own.
    """
    planned = {removal.folders: removal for removal in map(_plan, names)}
    return list(planned.values())


def _plan(name: str) -> Removal:
    if name in BUILT_IN_MODELS:
        raise RequestError(f"{name} is built in", param="model", hint="localllm ls shows others")
    for model in quantized_models():
        if name in (model.name, model.folder):
            return _folder_removal(model.name, "quantized here", Path(model.folder))
    cache = scan_hub_cache()
    source = _source(name, {repo.repo_id for repo in cache.known})
    if source.file is not None and not Path(source.name).is_dir():
        raise _not_ours(source)
    if source.repo is None:
        raise RequestError(
            f"{name} is a folder of your own", param="model", hint="delete it yourself: rm -r"
        )
    for repo in cache.known:
        if repo.repo_id == source.repo:
            remove = _repository_removal if source.tag is None else _gguf_removal
            return remove(name, source, cache.info, repo)
    for place in cache.not_understood:
        if place.repo == source.repo:
            return _folder_removal(name, f"{source.repo}, unfinished", place.folder)
    raise _not_here(name)


def _source(name: str, cached: set[str]) -> ModelSource:
    """Resolve a name, first as `ls` shows it: a repository's name may not be a valid model name."""
    if name in cached:
        return ModelSource(name, repo=name)
    try:
        return resolve_model(name)
    except CatalogError as error:
        if error.exit_code == ExitCode.MODEL:
            raise _not_here(name) from error
        raise


def _repository_removal(name: str, source: ModelSource, info: Any, repo: Any) -> Removal:
    """`info`, `repo`: as the hub's client scanned them."""
    wanted = _revisions(name, source, repo)
    # Of this repository alone: a mirror has revisions with the same hashes, and the client looks
    # for them in the whole cache.
    strategy = replace(info, repos=frozenset({repo})).delete_revisions(
        *(revision.commit_hash for revision in wanted)
    )
    is_whole = wanted == repo.revisions
    revisions = "" if is_whole else f"@{', '.join(each.commit_hash[:12] for each in wanted)}"
    folders = [repo.repo_path] if is_whole else [each.snapshot_path for each in wanted]
    return Removal(
        name,
        f"{repo.repo_id}{revisions}",
        tuple(folders),
        strategy.expected_freed_size,
        strategy.execute,
    )


def _gguf_removal(name: str, source: ModelSource, info: Any, repo: Any) -> Removal:
    """The GGUF model of a tag, in all revisions that have it; the repository if nothing else is
    there.
    """
    links, choices = [], set[str]()
    for revision in _revisions(name, source, repo):
        with suppress(CatalogError):  # it is in another revision
            sizes = StoreWalk().gguf(revision.snapshot_path)
            chosen = choose(sizes, source.tag, repo.repo_id)
            links += [revision.snapshot_path / each for each in chosen]
            choices |= {*chosen}
    if not links:
        raise _not_here(name)
    others = {file.file_path: file.blob_path for each in repo.revisions for file in each.files}
    blobs = {others.pop(link, link) for link in links}
    if not others:
        return _repository_removal(name, replace(source, tag=None), info, repo)
    blobs -= {*others.values()}
    num_bytes = sum(blob.stat().st_size for blob in blobs)

    def delete() -> None:
        for path in (*links, *blobs):
            path.unlink(missing_ok=True)

    what = f"{repo.repo_id}, {', '.join(sorted(choices))}"
    return Removal(name, what, tuple(links), num_bytes, delete)


def _not_ours(source: ModelSource) -> RequestError:
    """The error for a file that another program has downloaded, or that is the user's own."""
    stored = find_by_name(source.name)
    if stored is None or stored.file != source.file:
        return RequestError(
            f"{source.name} is a file of your own",
            param="model",
            hint=f"delete it yourself: rm {shlex.quote(source.name)}",
        )
    by_hand = f"{stored.program} itself, or delete that file"
    return RequestError(
        f"{stored.name} was downloaded by {stored.program}, and is not deleted here",
        param="model",
        where=str(stored.file),
        hint=f"ollama rm {stored.name}" if stored.program == OLLAMA else by_hand,
    )


def _revisions(name: str, source: ModelSource, repo: Any) -> frozenset[Any]:
    """The revisions that a name means: all of a repository, or the one that it names."""
    if source.revision is None or name in load_catalog():
        return frozenset(repo.revisions)
    found = frozenset(
        each
        for each in repo.revisions
        if source.revision == each.commit_hash or source.revision in each.refs
    )
    if not found:
        raise _not_here(name)
    return found


def _folder_removal(name: str, what: str, folder: Path) -> Removal:
    return Removal(name, what, (folder,), _size_of([folder]), partial(shutil.rmtree, folder))


def _size_of(folders: Collection[Path]) -> int:
    """Bytes of the files in these folders, where links are not followed, and of these files."""
    return sum(each.stat().st_size for each in folders if each.is_file()) + sum(
        path.lstat().st_size
        for folder in folders
        for root, _, names in os.walk(folder)
        for path in (Path(root) / name for name in names)
        if not path.is_symlink()
    )


def _not_here(name: str) -> CatalogError:
    return CatalogError(f"{name} is not on this machine", hint="localllm ls shows what is")
