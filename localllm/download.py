"""A model's files on this machine, fetched from the Hugging Face hub where they are not here.

What is here and complete is used without asking the hub; `localllm pull` looks for something newer.
"""

import errno
import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Protocol

from localllm.catalog import ModelSource
from localllm.errors import (
    CheckpointError,
    DownloadError,
    ExitCode,
    LocalLLMError,
    UnsupportedModelError,
)
from localllm.model_file import check_link
from localllm.runnable import check_config, check_listed
from localllm.transfer import HubFile, damaged_error, fetch_blob, fetched_bytes
from localllm.verified import VerifiedFiles, hash_file

logger = logging.getLogger(__name__)

# Weights only as safetensors, no code, nothing else a repository may hold.
SMALL_FILES = ("*.json", "*.jinja")
WANTED_FILES = ("*.safetensors", *SMALL_FILES)
# The same weights again in other layouts, and whatever lies in subfolders.
UNWANTED_FILES = ("consolidated*", "*/*")
# Files at a time.
_WORKERS = 4
# Disk that a download leaves free.
_SPARE_BYTES = 64 << 20


class DownloadProgress(Protocol):
    """Is told how a download goes, from several threads."""

    def begin(self, what: str, files: list[HubFile]) -> AbstractContextManager[None]:
        """`files` are to be fetched, or checked, as `what` says."""

    def advance(self, file: HubFile, num_bytes: int) -> None:
        """So many bytes of a file are done."""


class NoProgress:
    """Shows nothing."""

    def begin(self, what: str, files: list[HubFile]) -> AbstractContextManager[None]:
        """See DownloadProgress."""
        return nullcontext()

    def advance(self, file: HubFile, num_bytes: int) -> None:
        """See DownloadProgress."""


@dataclass(frozen=True, slots=True)
class HubSnapshot:
    """The wanted files of a repository at a commit; `missing` are those not in the cache, of which
    `partial_bytes` are here by the file's name. `names`: of all its files.
    """

    repo: str
    commit: str
    files: list[HubFile]
    missing: list[HubFile]
    names: list[str]
    partial_bytes: dict[str, int] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return sum(file.num_bytes for file in self.files)

    @property
    def missing_bytes(self) -> int:
        """Still to be fetched."""
        return sum(file.num_bytes for file in self.missing) - sum(self.partial_bytes.values())


def fetch_model(
    source: ModelSource,
    *,
    with_weights: bool = True,
    progress: DownloadProgress | None = None,
    refresh: bool = False,
) -> Path:
    """The folder with the files of `source`, downloaded into the hub's own cache if need be.

    Without weights only the small files are fetched; weights that are there already are found.
    `refresh` asks the hub whether there is a newer revision. The hub's variables hold (HF_HOME,
    HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT).

    Raises: DownloadError, whose exit code says why: 3 gated or unknown, 4 network, 5 disk, damage;
    CheckpointError (7) before any weight is fetched of a model that cannot run.
    """
    if source.folder is not None:
        return source.folder
    assert source.repo is not None
    verified, progress = VerifiedFiles(), progress or NoProgress()
    wanted = WANTED_FILES if with_weights else SMALL_FILES
    here = find_snapshot(source.repo, source.revision)
    if here is not None and not refresh and verified.is_complete(here, with_weights=with_weights):
        _check_links(here)
        return here
    name = repo_name(source)
    with hub_errors(name, source.repo):
        try:
            snapshot = look_up(source.repo, source.revision, wanted)
        except Exception as error:
            if here is None or not _is_unreachable(error):
                raise
            problem = _problem(here, with_weights)
            if problem is not None:
                raise _unreachable(name, f"{problem}; {error!s:.100}") from error
            logger.warning("the hub cannot be reached; %s is used as it is here", name)
            _check_links(here)
            return here
        if with_weights:
            check_runnable(snapshot)
        folder = _fetch(snapshot, source.revision, wanted, verified, progress)
    _check_links(folder)
    _check_hashes(snapshot, folder, verified, progress)
    verified.add_snapshot(folder, [file.name for file in snapshot.files])
    return folder


def repo_name(source: ModelSource) -> str:
    """A repository as users write it, with its revision if one is asked for."""
    assert source.repo is not None
    return f"{source.repo}@{source.revision}" if source.revision else source.repo


def find_snapshot(repo: str, revision: str | None) -> Path | None:
    """The folder of a revision in the cache, whole or not; None where it was never fetched."""
    root = cache_root(repo)
    ref = root / "refs" / (revision or "main")
    try:
        commit = ref.read_text().strip() if ref.is_file() else revision or ""
    except OSError:
        return None
    folder = root / "snapshots" / commit
    return folder if commit and folder.is_dir() else None


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids to ask the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def is_whole(snapshot: Path) -> bool:
    """Whether a snapshot is known to have all its files, weights among them."""
    return VerifiedFiles().is_complete(snapshot, with_weights=True)


def cache_root(repo: str) -> Path:
    """Where the hub's cache keeps a repository."""
    # Imported here: the client takes half a second.
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{repo.replace('/', '--')}"


def look_up(repo: str, revision: str | None, wanted: tuple[str, ...] = WANTED_FILES) -> HubSnapshot:
    """Ask the hub what files there are. Raises: the client's errors."""
    from huggingface_hub import HfApi

    info = HfApi().model_info(repo, revision=revision, files_metadata=True)
    files = []
    for sibling in info.siblings or []:
        name, digest = sibling.rfilename, sibling.blob_id or ""
        if sibling.lfs is not None:
            digest = sibling.lfs.sha256
        is_wanted = any(fnmatch(name, pattern) for pattern in wanted)
        if is_wanted and not any(fnmatch(name, pattern) for pattern in UNWANTED_FILES):
            files.append(HubFile(name, sibling.size or 0, digest))
    root = cache_root(repo)
    commit = str(info.sha)
    missing = [
        file
        for file in files
        if not (root / "snapshots" / commit / file.name).exists()
        and not (file.digest and (root / "blobs" / file.digest).exists())
    ]
    names = [sibling.rfilename for sibling in info.siblings or []]
    partial = {file.name: fetched_bytes(root / "blobs" / file.digest, file) for file in missing}
    return HubSnapshot(repo, commit, files, missing, names, partial)


def check_runnable(snapshot: HubSnapshot) -> None:
    """Look at the list of files, and at config.json where weights are missing, which is fetched
    for that. Raises: CheckpointError (7) for a model that cannot run; the client's errors.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    check_listed(snapshot.repo, snapshot.names)
    if not any(file.name.endswith(".safetensors") for file in snapshot.missing):
        return
    disable_progress_bars()  # ours are drawn
    with tempfile.TemporaryDirectory() as folder:
        name, commit = "config.json", snapshot.commit
        path = Path(hf_hub_download(snapshot.repo, name, revision=commit, local_dir=folder))
        [digest] = [file.digest for file in snapshot.files if file.name == name]
        if hash_file(path, digest) != digest:  # a damaged one is fetched again below
            return
        try:
            check_config(Path(folder))
        except CheckpointError as error:
            # The copy that was looked at is gone when this is read, and the hub has no other one.
            error.where = error.where.replace(str(path), f"{name} of {snapshot.repo}")
            if not isinstance(error, UnsupportedModelError):
                error.hint = "the hub has it so; its page, or its makers, may know more"
            raise


def check_disk(snapshot: HubSnapshot) -> None:
    """Raises: DownloadError (5) where the disk has not room for what is missing."""
    place = cache_root(snapshot.repo)
    while not place.exists():
        place = place.parent
    free, needed = shutil.disk_usage(place).free, snapshot.missing_bytes
    if needed + _SPARE_BYTES > free:
        raise DownloadError(
            f"{snapshot.repo} needs {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free",
            where=str(place),
            hint="free some space (localllm ls, localllm rm), or point HF_HOME to another disk",
            exit_code=ExitCode.DISK,
        )


def _fetch(
    snapshot: HubSnapshot,
    revision: str | None,
    wanted: tuple[str, ...],
    verified: VerifiedFiles,
    progress: DownloadProgress,
) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # ours are drawn
    check_disk(snapshot)
    blobs = cache_root(snapshot.repo) / "blobs"
    large = [file for file in snapshot.missing if len(file.digest) == 64]

    stopped = threading.Event()

    def fetch(file: HubFile) -> None:
        def on_bytes(count: int) -> None:
            if stopped.is_set():
                raise _StoppedError
            progress.advance(file, count)

        place = blobs / file.digest
        fetch_blob(snapshot.repo, snapshot.commit, file, place, verified, on_bytes)

    if large:
        with progress.begin("fetching", large):
            try:
                _in_parallel([partial(fetch, file) for file in large])
            finally:
                stopped.set()
    # Links, small files, and which commit a name stands for.
    return Path(
        snapshot_download(
            snapshot.repo,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(UNWANTED_FILES),
        )
    )


class _StoppedError(Exception):
    """Nobody waits for the file any more."""


def _in_parallel(calls: list[Callable[[], None]]) -> None:
    """Make all calls, a few at a time, in threads that die with the program, so that Ctrl-C waits
    for none. Raises: what the first of them that fails raises.
    """
    waiting: SimpleQueue[Callable[[], None]] = SimpleQueue()
    outcomes: SimpleQueue[Exception | None] = SimpleQueue()
    for call in calls:
        waiting.put(call)

    def work() -> None:
        while True:
            try:
                call = waiting.get_nowait()
            except Empty:
                return
            try:
                call()
                outcomes.put(None)
            except Exception as error:
                outcomes.put(error)

    for _ in range(min(_WORKERS, len(calls))):
        threading.Thread(target=work, name="download", daemon=True).start()
    for _ in calls:
        error = outcomes.get()
        if error is not None:
            raise error


def _check_hashes(
    snapshot: HubSnapshot, folder: Path, verified: VerifiedFiles, progress: DownloadProgress
) -> None:
    """Hold every file against its hash, if that was not done before.

    Raises: DownloadError (5) for one that differs; it is set aside, and the next run fetches it.
    """
    unknown = [
        file
        for file in snapshot.files
        if len(file.digest) in (40, 64)
        and (folder / file.name).exists()
        and not verified.knows(folder / file.name, file.digest)
    ]
    if not unknown:
        return
    with progress.begin("checking", unknown):
        for file in unknown:
            done = 0

            def count(num_bytes: int, file: HubFile = file) -> None:
                nonlocal done
                done += num_bytes
                progress.advance(file, done)

            found = hash_file(folder / file.name, file.digest, count)
            if found != file.digest:
                blob = (folder / file.name).resolve()
                damaged = blob.replace(blob.with_name(f"{blob.name}.damaged"))
                (folder / file.name).unlink(missing_ok=True)
                raise damaged_error(file, found, damaged)
            verified.add(folder / file.name, file.digest)


def _problem(folder: Path, with_weights: bool) -> str | None:
    """What a snapshot lacks, as far as can be seen without the hub."""
    from localllm.model.weight_files import find_weight_files

    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).exists()]
    if missing:
        return f"missing: {', '.join(missing)}"
    try:
        if with_weights:
            find_weight_files(folder)
    except LocalLLMError as error:
        return error.message
    return None


def _unreachable(name: str, reason: str) -> DownloadError:
    return DownloadError(
        f"{name} is not on this machine, and the hub cannot be reached",
        where=re.sub(r"\[Errno -?\d+\] ", "", reason.partition("\n")[0])[:300],
        hint="check the network (HF_ENDPOINT, HF_HUB_OFFLINE), or give a folder",
    )


def _is_unreachable(error: Exception) -> bool:
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        status = getattr(error.response, "status_code", 0)
        return not isinstance(error, errors.RepositoryNotFoundError) and status >= 500
    if isinstance(error, errors.OfflineModeIsEnabled):
        return True
    return not isinstance(error, (errors.HFValidationError, LocalLLMError))


@contextmanager
def hub_errors(name: str, repo: str) -> Iterator[None]:
    """The client's errors as ours."""
    from huggingface_hub import errors

    try:
        yield
    except LocalLLMError:
        raise
    except errors.GatedRepoError as error:
        from huggingface_hub import get_token

        token = "https://huggingface.co/settings/tokens gives a token for HF_TOKEN"
        if get_token() is not None:
            token = "the token that is set (HF_TOKEN, or hf auth login) may not read it yet"
        raise DownloadError(
            f"{repo} is gated: its licence has to be accepted first",
            where=token,
            hint=f"accept it at https://huggingface.co/{repo}",
            exit_code=ExitCode.MODEL,
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(
            f"{repo} has no revision {name.partition('@')[2]!r:.80}",
            hint="a branch, a tag or a commit of it, or none for the newest",
            exit_code=ExitCode.MODEL,
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"the hub has no model {name!r}, or it is private",
            hint="check the spelling; for a private one set HF_TOKEN",
            exit_code=ExitCode.MODEL,
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise _unreachable(name, str(error)) from error
    except errors.HFValidationError as error:
        raise DownloadError(
            f"{name!r} is not a name of the hub", exit_code=ExitCode.MODEL
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise DownloadError(
                f"the hub refuses access to {name} (status {status})",
                hint="check HF_TOKEN: it may be wrong, or may not read this model",
                exit_code=ExitCode.MODEL,
            ) from error
        raise DownloadError(
            f"the hub failed on {name} (status {status})",
            hint="run the same command again; it goes on where it stopped",
        ) from error
    except OSError as error:
        raise _transfer_error(name, error) from error
    except Exception as error:  # whatever the client's transport raises
        raise _unreachable(name, str(error)) from error


def _transfer_error(name: str, error: OSError) -> LocalLLMError:
    on_disk = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT)
    if error.errno in on_disk:
        return DownloadError(
            f"the files of {name} cannot be written: {error.strerror}",
            where=str(error.filename or ""),
            hint="free some space, or point HF_HOME to another disk; what is here is kept",
            exit_code=ExitCode.DISK,
        )
    return DownloadError(
        f"the download of {name} failed: {error!s:.200}",
        hint="run the same command again; it goes on where it stopped",
    )


def _check_links(snapshot: Path) -> None:
    """The cache's snapshots are links into its blobs; a link that leads elsewhere is refused."""
    for path in snapshot.iterdir():
        check_link(path)
