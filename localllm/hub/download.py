"""A model's files on this machine, fetched from the Hugging Face hub if they are missing.

Complete files are used without asking the hub; `localllm pull` looks for a newer revision.
"""

import errno
import logging
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue

from localllm.errors import (
    CheckpointError,
    DownloadError,
    ExitCode,
    LocalLLMError,
    UnsupportedModelError,
)
from localllm.files.model_file import check_link
from localllm.files.regular_file import read_regular
from localllm.hub.catalog import ModelSource
from localllm.hub.headers_alone import fetch_headers
from localllm.hub.names_here import with_other_tags
from localllm.hub.quantized_files import choose
from localllm.hub.runnable import check_config, check_listed
from localllm.hub.snapshot import (
    SMALL_FILES,
    WANTED_FILES,
    HubSnapshot,
    cache_root,
    link_file,
    look_up,
    note_revision,
    ref_path,
    snapshot_folder,
)
from localllm.hub.store_walk import StoreWalk
from localllm.hub.transfer import HubFile, damaged_error, fetch_blob, fetch_file, is_commit
from localllm.hub.verified import VerifiedFiles, hash_file

logger = logging.getLogger(__name__)

# Files fetched at a time.
_WORKERS = 4
# Disk space that a download leaves free.
_SPARE_BYTES = 64 << 20


class DownloadProgress:
    """Receives the progress of a download, from several threads; this one shows nothing."""

    def begin(self, what: str, files: list[HubFile]) -> AbstractContextManager[None]:
        """Called before `files` are fetched or checked, as `what` says."""
        return nullcontext()

    def advance(self, file: HubFile, num_bytes: int) -> None:
        """`num_bytes` of a file are done so far."""


def fetch_model(
    source: ModelSource,
    *,
    with_weights: bool = True,
    progress: DownloadProgress | None = None,
    refresh: bool = False,
) -> Path:
    """The folder with the files of `source`, downloaded into the hub's cache if necessary; that of
    a GGUF model is made from its header.

    Without weights only the small files are fetched, or the headers of a GGUF model; weights that
    are already here are found. `refresh` asks the hub whether there is a
    newer revision. The hub's variables apply (HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE,
    HF_ENDPOINT).

    Raises: DownloadError, whose exit code says why: 3 gated or unknown, 4 network, 5 disk, damage;
    CatalogError (3), which lists what there is, for a tag that means no file; CheckpointError (7)
    for a model that cannot run, before any weight is fetched.
    """
    verified, progress = VerifiedFiles(), progress or DownloadProgress()
    can_be_newer = refresh and source.repo is not None
    found = None if can_be_newer else find_here(source, with_weights=with_weights)
    if found is not None:
        return found
    assert source.repo is not None
    wanted = WANTED_FILES if with_weights else SMALL_FILES
    here = find_snapshot(source.repo, source.revision)
    name = repo_name(source)
    with hub_errors(name, source.repo):
        try:
            snapshot = look_up(source.repo, source.revision, wanted, source.tag)
        except Exception as error:
            if here is None or not _is_unreachable(error):
                raise
            try:
                unverified = _place_in(here, source, with_weights)
            except LocalLLMError as missing:
                raise _unreachable(name, f"{missing.message}; {error!s:.100}") from error
            logger.warning("the hub cannot be reached; using the local copy of %s", name)
            return _folder_at(unverified)
        if with_weights:
            check_runnable(snapshot)
        elif snapshot.gguf_file is not None and snapshot.missing:
            return _folder_at(fetch_headers(snapshot))
        folder = _fetch(snapshot, source.revision, verified, progress)
    _check_links(folder)
    _check_hashes(snapshot, folder, verified, progress)
    names = [file.name for file in snapshot.files]
    if snapshot.gguf_file is None:
        verified.add_snapshot(folder, names)
        return folder
    verified.add_choice(folder, source.tag, names)
    return _folder_at(folder / snapshot.gguf_file)


def find_here(source: ModelSource, *, with_weights: bool = True) -> Path | None:
    """The folder of a model whose files are known to be here, all of them and undamaged; None if
    the hub has to be asked. Raises: as `fetch_model`.
    """
    if source.file is not None:
        return _folder_at(source.file)
    if source.folder is not None:
        return source.folder
    assert source.repo is not None
    snapshot, verified = find_snapshot(source.repo, source.revision), VerifiedFiles()
    if snapshot is None:
        return None
    if source.tag is None and verified.is_complete(snapshot, with_weights=with_weights):
        return _folder_at(snapshot)
    chosen = verified.chosen(snapshot, source.tag)
    return None if chosen is None else _folder_at(chosen)


def _folder_at(place: Path) -> Path:
    """The folder of a model, given that of its files or the first of its GGUF files."""
    if place.is_dir():
        _check_links(place)
        return place
    from localllm.hub.gguf_folder import folder_of

    return folder_of(place)


def repo_name(source: ModelSource) -> str:
    """A repository as users write it, with the revision and the tag that are requested."""
    assert source.repo is not None
    revision = f"@{source.revision}" if source.revision else ""
    return f"{source.repo}{revision}{f':{source.tag}' if source.tag else ''}"


def find_snapshot(repo: str, revision: str | None) -> Path | None:
    """The folder of a revision in the cache, complete or not; None if it was never fetched.

    Raises: DownloadError (3) for an invalid revision name.
    """
    root = cache_root(repo)
    try:
        commit = read_regular(ref_path(root, revision), 1000).decode().strip()
    except (OSError, ValueError):
        commit = revision or ""
    folder = root / "snapshots" / commit
    return folder if is_commit(commit) and folder.is_dir() else None


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE forbids asking the hub."""
    from huggingface_hub import constants

    return bool(constants.HF_HUB_OFFLINE)


def check_runnable(snapshot: HubSnapshot) -> None:
    """Check the list of files, and if weights are missing also config.json, which is fetched for
    that. Raises: CheckpointError (7) for a model that cannot run; the client's errors.
    """
    repo = snapshot.origin.repo
    if snapshot.gguf_file is None:
        check_listed(repo, snapshot.names)
    if not any(file.name.endswith(".safetensors") for file in snapshot.missing):
        return  # none to fetch, or a GGUF model, whose header is in the file itself
    with tempfile.TemporaryDirectory() as folder:
        [config] = [file for file in snapshot.files if file.name == "config.json"]
        path = Path(folder) / config.name
        fetch_file(snapshot.origin, config, path)
        if hash_file(path, config.digest) != config.digest:  # if damaged, it is fetched again later
            return
        try:
            check_config(Path(folder))
        except CheckpointError as error:
            # The copy that was checked is gone when this is read, and the hub has no other one.
            error.where = error.where.replace(str(path), f"{path.name} of {repo}")
            if not isinstance(error, UnsupportedModelError):
                error.hint = "the model's page, or its makers; the hub's file is like that"
            raise


def check_disk(snapshot: HubSnapshot) -> None:
    """Raises: DownloadError (5) if the disk has no room for the missing files."""
    repo = snapshot.origin.repo
    place = cache_root(repo)
    while not place.exists():
        place = place.parent
    free, needed = shutil.disk_usage(place).free, snapshot.missing_bytes
    if needed + _SPARE_BYTES > free:
        raise DownloadError(
            f"{repo} needs {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free",
            where=str(place),
            hint="free some space (localllm ls, localllm rm), or point HF_HOME to another disk",
            exit_code=ExitCode.DISK,
        )


def _fetch(
    snapshot: HubSnapshot,
    revision: str | None,
    verified: VerifiedFiles,
    progress: DownloadProgress,
) -> Path:
    check_disk(snapshot)
    origin = snapshot.origin
    blobs = cache_root(origin.repo) / "blobs"
    stopped = threading.Event()

    def fetch(file: HubFile) -> None:
        def on_bytes(count: int) -> None:
            if stopped.is_set():
                raise _StoppedError
            progress.advance(file, count)

        fetch_blob(origin, file, blobs / file.digest, verified, on_bytes)

    if snapshot.missing:
        with progress.begin("fetching", snapshot.missing):
            try:
                _in_parallel([partial(fetch, file) for file in snapshot.missing])
            finally:
                stopped.set()
    for file in snapshot.files:
        link_file(origin, file)
    note_revision(origin, revision)
    return snapshot_folder(origin)


class _StoppedError(Exception):
    """The download was stopped, so the file is no longer needed."""


def _in_parallel(calls: list[Callable[[], None]]) -> None:
    """Make all calls, a few at a time, in daemon threads, so that Ctrl-C waits for none of them.
    Raises: the error of the first call that fails.
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
    """Check every file against its hash, unless that was done before.

    Raises: DownloadError (5) for a file that differs; it is set aside, and the next run fetches it.
    """
    unknown = [
        file
        for file in snapshot.files
        if (folder / file.name).exists() and not verified.knows(folder / file.name, file.digest)
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


def _place_in(snapshot: Path, source: ModelSource, with_weights: bool) -> Path:
    """The place of a model in a snapshot that nothing is known of, as far as can be seen without
    the hub. Raises: LocalLLMError, whose message says what it lacks.
    """
    from localllm.model.weight_files import find_weight_files

    gguf = StoreWalk().gguf(snapshot)
    if source.tag is not None or (gguf and not (snapshot / "config.json").exists()):
        return snapshot / choose(gguf, source.tag, repo_name(source))[0]
    missing = [name for name in ("config.json", "tokenizer.json") if not (snapshot / name).exists()]
    if missing:
        raise CheckpointError(f"missing: {', '.join(missing)}")
    if with_weights:
        find_weight_files(snapshot)
    return snapshot


def _unreachable(name: str, reason: str) -> DownloadError:
    return DownloadError(
        f"{name} is not on this machine, and the hub cannot be reached",
        where=re.sub(r"\[Errno -?\d+\] ", "", reason.partition("\n")[0])[:300],
        hint=_other_tags(name) or "check the network (HF_ENDPOINT, HF_HUB_OFFLINE), or a folder",
    )


def _other_tags(name: str) -> str:
    """The next step where models that only differ in their tags are here; "" if none are."""
    here = with_other_tags(name)
    return f"{', '.join(here)}, which is on this machine" if here else ""


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
    """Turn the client's errors into ours."""
    from huggingface_hub import errors

    try:
        yield
    except LocalLLMError:
        raise
    except errors.GatedRepoError as error:
        from huggingface_hub import get_token

        token = "HF_TOKEN needs a token from https://huggingface.co/settings/tokens"
        if get_token() is not None:
            token = "the current token (HF_TOKEN, or hf auth login) has no access to it yet"
        raise DownloadError(
            f"{repo} is gated: its licence must be accepted first",
            where=token,
            hint=f"accept it at https://huggingface.co/{repo}",
            exit_code=ExitCode.MODEL,
        ) from error
    except errors.RevisionNotFoundError as error:
        raise DownloadError(
            f"{repo} has no revision {name.partition('@')[2].partition(':')[0]!r:.80}",
            hint="a branch, a tag or a commit of it, or none for the newest",
            exit_code=ExitCode.MODEL,
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise DownloadError(
            f"the hub has no model {name!r}, or it is private",
            hint=_other_tags(name) or "check the spelling; for a private one set HF_TOKEN",
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
                hint="check HF_TOKEN: it may be wrong, or have no access to this model",
                exit_code=ExitCode.MODEL,
            ) from error
        raise DownloadError(
            f"the hub failed on {name} (status {status})",
            hint="run the same command again; it continues where it stopped",
        ) from error
    except OSError as error:
        raise _transfer_error(name, error) from error
    except Exception as error:  # anything that the client's transport raises
        raise _unreachable(name, str(error)) from error


def _transfer_error(name: str, error: OSError) -> LocalLLMError:
    on_disk = (errno.ENOSPC, errno.EACCES, errno.EPERM, errno.EROFS, errno.EDQUOT)
    if error.errno in on_disk:
        return DownloadError(
            f"the files of {name} cannot be written: {error.strerror}",
            where=str(error.filename or ""),
            hint="free some space, or point HF_HOME to another disk; fetched data is kept",
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
