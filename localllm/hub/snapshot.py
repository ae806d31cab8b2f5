"""The files of a hub repository at a commit, and their place in the hub's cache.

Names, hashes and commits come from the hub, and all of them become parts of paths. They are checked
on arrival: an invalid `HubFile` or `HubCommit` cannot be constructed. The cache has the layout of
the hub's client, so that both see the same files. The client itself is only asked for lists, since
it uses response headers as parts of paths without checking them.
"""

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from localllm.errors import DownloadError, ExitCode
from localllm.hub.quantized_files import ENDING, choose, models_among
from localllm.hub.transfer import HubCommit, HubFile, RepoKind, fetched_bytes
from localllm.text import template_files

# Weights only as safetensors, beside GGUF models; no code, nor anything else that a repository may
# hold.
SMALL_FILES = ("*.json", "*.jinja")
WANTED_FILES = ("*.safetensors", *SMALL_FILES)
# The same weights again in another layout.
_UNWANTED_FILE = "consolidated*"
# Of subfolders only further templates, and what tells how embeddings and scores are made.
_IN_SUBFOLDER = re.compile(
    rf"[0-9]{{1,3}}_\w{{1,64}}/config\.json|{template_files.FOLDER}/[\w.-]{{1,64}}\.jinja", re.ASCII
)
_REVISION = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)*", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The wanted files of a repository at a commit: of one form, safetensors or a GGUF model.

    `missing` are those not in the cache; `partial_bytes`: how much of them is already here, by file
    name; `names`: of all its files; `gguf`: bytes of the GGUF files among them.
    """

    origin: HubCommit
    files: list[HubFile]
    missing: list[HubFile]
    names: list[str]
    partial_bytes: dict[str, int] = field(default_factory=dict)
    gguf: dict[str, int] = field(default_factory=dict)

    @property
    def gguf_file(self) -> str | None:
        """The first file of the GGUF model that is wanted; None if safetensors are."""
        return next((file.name for file in self.files if file.name in self.gguf), None)

    @property
    def num_bytes(self) -> int:
        """Bytes of all wanted files."""
        return sum(file.num_bytes for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """Bytes still to be fetched."""
        return sum(file.num_bytes for file in self.missing) - sum(self.partial_bytes.values())


def cache_root(repo: str, kind: RepoKind = "model") -> Path:
    """A repository's folder in the hub's cache. Raises: DownloadError (5) without a home folder."""
    # Imported here: the client takes half a second to import.
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    if cache.parts[0].startswith("~"):  # the client would create it in the working folder
        raise DownloadError(
            "there is no place for downloads: the user has no home folder",
            hint="set HOME, or HF_HOME",
            exit_code=ExitCode.DISK,
        )
    return cache / f"{kind}s--{repo.replace('/', '--')}"


def look_up(
    repo: str,
    revision: str | None,
    wanted: tuple[str, ...] = WANTED_FILES,
    tag: str | None = None,
) -> HubSnapshot:
    """Ask the hub which files a model has: those that match `wanted`, or those of a GGUF model if
    `tag` chooses one, or if the repository has no safetensors.

    Raises: DownloadError for an answer that makes no sense; CatalogError as `choose`; the client's
    errors.
    """
    root = cache_root(repo)
    origin, listed = _ask(repo, revision, "model")
    names = [each.rfilename for each in listed]
    gguf = {
        each.rfilename: each.size if type(each.size) is int else 0
        for each in listed
        if _is_gguf(each.rfilename)
    }
    is_gguf_only = bool(models_among(gguf)) and not any(_is_safetensors(name) for name in names)
    if tag is not None or is_gguf_only:
        chosen = set(choose(gguf, tag, repo))
        files = [_checked_file(each) for each in listed if each.rfilename in chosen]
        files.sort(key=lambda file: file.name)
    else:
        files = [_checked_file(each) for each in listed if _is_wanted(each.rfilename, wanted)]
    missing = [file for file in files if not _is_here(root, origin, file)]
    partial = {each.name: fetched_bytes(root / "blobs" / each.digest, each) for each in missing}
    return HubSnapshot(origin, files, missing, names, partial, gguf)


def look_up_dataset(repo: str, endings: tuple[str, ...]) -> tuple[HubCommit, list[HubFile]]:
    """Ask the hub which files with these endings a data set has. Raises: as `look_up`."""
    origin, listed = _ask(repo, None, "dataset")
    return origin, [_checked_file(each) for each in listed if each.rfilename.endswith(endings)]


def snapshot_folder(origin: HubCommit) -> Path:
    """The folder of a commit's files by name, which are links to blobs."""
    return cache_root(origin.repo, origin.kind) / "snapshots" / origin.commit


def link_file(origin: HubCommit, file: HubFile) -> Path:
    """Give a file its name in the snapshot, if it has none yet; its content is in the cache."""
    root, place = cache_root(origin.repo, origin.kind), snapshot_folder(origin) / file.name
    blob = root / "blobs" / file.digest
    if place.exists():  # from another program; its content is checked later
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    place.unlink(missing_ok=True)  # a link to a deleted blob
    try:
        place.symlink_to(os.path.relpath(blob, place.parent))
    except FileExistsError:
        pass  # another process has just made it
    except OSError:  # a file system without links
        shutil.move(blob, place)
    return place


def note_revision(origin: HubCommit, revision: str | None) -> None:
    """Record which commit a branch or a tag stands for, so that it is found without the hub."""
    if revision == origin.commit:
        return
    path = ref_path(cache_root(origin.repo, origin.kind), revision)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f"{path.name}.{os.getpid()}.new")
    aside.write_text(origin.commit)
    aside.replace(path)


def ref_path(root: Path, revision: str | None) -> Path:
    """The file with the commit of a branch or a tag. Raises: DownloadError for a bad name."""
    name = revision or "main"
    if not _REVISION.fullmatch(name):
        raise DownloadError(
            f"{name!r:.80} is not a revision",
            hint="a branch, a tag or a commit",
            exit_code=ExitCode.MODEL,
        )
    return root / "refs" / name


def _ask(repo: str, revision: str | None, kind: RepoKind) -> tuple[HubCommit, list[Any]]:
    """A commit and the client's descriptions of its files."""
    from huggingface_hub import HfApi

    ask: Callable[..., Any] = HfApi().model_info if kind == "model" else HfApi().dataset_info
    info = ask(repo, revision=revision, files_metadata=True)
    return HubCommit(repo, info.sha or "", kind), list(info.siblings or [])


def _is_gguf(name: object) -> bool:
    return isinstance(name, str) and name.lower().endswith(ENDING) and name.isprintable()


def _is_safetensors(name: object) -> bool:
    return isinstance(name, str) and name.endswith(".safetensors")


def _is_wanted(name: str, wanted: tuple[str, ...]) -> bool:
    if "/" in name:
        return _IN_SUBFOLDER.fullmatch(name) is not None
    return any(fnmatch(name, pattern) for pattern in wanted) and not fnmatch(name, _UNWANTED_FILE)


def _checked_file(sibling: Any) -> HubFile:
    digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
    return HubFile(sibling.rfilename, sibling.size or 0, digest or "")


def _is_here(root: Path, origin: HubCommit, file: HubFile) -> bool:
    named = root / "snapshots" / origin.commit / file.name
    return named.exists() or (root / "blobs" / file.digest).exists()
