"""A model's files on this machine, fetched from the Hugging Face hub where they are not here."""

import errno
from pathlib import Path

from localllm.catalog import ModelSource
from localllm.errors import CheckpointError, DownloadError, ExitCode, LocalLLMError

# Weights only as safetensors, no code, nothing else a repository may hold.
SMALL_FILES = ("*.json", "*.jinja")
WANTED_FILES = ("*.safetensors", *SMALL_FILES)
# The same weights again in other layouts, and whatever lies in subfolders.
UNWANTED_FILES = ("consolidated*", "*/*")


def fetch_model(source: ModelSource, *, with_weights: bool = True) -> Path:
    """The folder with the files of `source`, downloaded into the hub's own cache if need be.

    Without weights only the small files are fetched; weights that are there already are found.

    The hub's variables hold (HF_HOME, HF_HUB_CACHE, HF_TOKEN, HF_HUB_OFFLINE, HF_ENDPOINT).

    Raises: DownloadError, whose exit code says why: 3 gated or unknown, 4 network, 5 disk.
    """
    if source.folder is not None:
        return source.folder
    assert source.repo is not None
    wanted = WANTED_FILES if with_weights else SMALL_FILES
    folder = _download(source.repo, source.revision, wanted)
    _check_links(folder)
    return folder


def _download(repo: str, revision: str | None, wanted: tuple[str, ...]) -> Path:
    # Imported here: the client takes half a second, and a model that is here needs none of it.
    from huggingface_hub import errors, snapshot_download

    name = f"{repo}@{revision}" if revision else repo
    try:
        folder = snapshot_download(
            repo,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(UNWANTED_FILES),
        )
        return Path(folder)
    except errors.GatedRepoError as error:
        raise DownloadError(
            f"{repo} is gated: its licence has to be accepted first",
            hint=f"accept it at https://huggingface.co/{repo}, then set HF_TOKEN",
            exit_code=ExitCode.MODEL,
        ) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError) as error:
        raise DownloadError(
            f"the hub has no model {name!r}, or it is private",
            hint="check the spelling; for a private one set HF_TOKEN",
            exit_code=ExitCode.MODEL,
        ) from error
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        raise DownloadError(
            f"{name} is not on this machine, and the hub cannot be reached",
            where=f"{error!s:.200}".splitlines()[0],
            hint="check the network (HF_ENDPOINT, HF_HUB_OFFLINE), or give a folder",
        ) from error
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
            f"the hub failed on {name} (status {status})", hint="run the same command again"
        ) from error
    except OSError as error:
        raise _transfer_error(name, error) from error
    except Exception as error:  # whatever the client's transport raises
        raise DownloadError(
            f"the download of {name} failed: {error!s:.200}", hint="run the same command again"
        ) from error


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
    root = snapshot.resolve().parent.parent
    for path in snapshot.rglob("*"):
        if not path.resolve().is_relative_to(root):
            raise CheckpointError(
                f"{path.name} is a link out of the model's folder",
                where=str(path),
                hint="remove the model from the cache and download it again",
            )
