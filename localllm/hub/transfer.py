"""Fetches one file from the hub into its cache: resumed where it stopped, and checked.

The hub's client starts a file again after a run that failed or was killed; for a model's files that
means gigabytes. Places and names are the client's own, so that both see the same cache.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from localllm.errors import DownloadError, ExitCode
from localllm.hub.verified import VerifiedFiles, hash_file

logger = logging.getLogger(__name__)

_ATTEMPTS = 5
_PAUSE_S = 1.0
_PARTIAL_SUFFIX = ".localllm-partial"
_DIGEST, _COMMIT = re.compile("[0-9a-f]{40}|[0-9a-f]{64}"), re.compile("[0-9a-f]{40}")
# Limits of file systems, and of other programs that handle a path.
_MAX_NAME_BYTES, _MAX_PATH_BYTES = 255, 1000

RepoKind = Literal["model", "dataset"]


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file in a repository, as the hub lists it; `digest` is the SHA-256 of a large file, else
    git's SHA-1.

    Raises: DownloadError if the hub's name, size or hash is invalid: name and hash become paths.
    """

    name: str
    num_bytes: int
    digest: str

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise _senseless(f"a file is called {self.name!r:.100}")
        if type(self.num_bytes) is not int or self.num_bytes < 0:
            raise _senseless(f"{self.name} has {self.num_bytes!r:.40} bytes")
        if not isinstance(self.digest, str) or not _DIGEST.fullmatch(self.digest):
            raise _senseless(f"the hash of {self.name} is {self.digest!r:.100}")


@dataclass(frozen=True, slots=True)
class HubCommit:
    """A commit of a repository. Raises: DownloadError if what the hub sent is not a hash."""

    repo: str
    commit: str
    kind: RepoKind = "model"

    def __post_init__(self) -> None:
        if not is_commit(self.commit):
            raise _senseless(f"the commit of {self.repo} is {self.commit!r:.100}")


def is_commit(text: object) -> bool:
    """Whether `text` is the hash of a commit."""
    return isinstance(text, str) and _COMMIT.fullmatch(text) is not None


def _is_name(name: object) -> bool:
    """Whether `name` is a printable path of a file below a folder, on any system."""
    if not isinstance(name, str) or not name.isprintable() or "\\" in name:
        return False
    parts = name.split("/")
    return all(
        part not in ("", ".", "..") and len(part.encode()) <= _MAX_NAME_BYTES for part in parts
    ) and (len(name.encode()) <= _MAX_PATH_BYTES)


def _senseless(found: str) -> DownloadError:
    return DownloadError(
        f"the hub's answer makes no sense: {found}",
        where="nothing was fetched",
        hint="again later, or another mirror; HF_ENDPOINT may name a server that is not a hub",
    )


def fetch_blob(
    origin: HubCommit,
    file: HubFile,
    blob: Path,
    verified: VerifiedFiles,
    on_bytes: Callable[[int], None],
) -> None:
    """Fetch `file` to `blob`, through a partial file beside it; `on_bytes` is told how many of its
    bytes are here.

    Waits for another process that fetches the same file. Raises: DownloadError (5) if the file
    differs from its hash twice; the client's errors, OSError.
    """
    from filelock import FileLock

    blob.parent.mkdir(parents=True, exist_ok=True)
    partial = blob.with_name(blob.name + _PARTIAL_SUFFIX)
    with FileLock(f"{blob}.lock"):
        if blob.exists():
            on_bytes(file.num_bytes)
            return
        for is_second in (False, True):
            fetch_file(origin, file, partial, on_bytes)
            found = hash_file(partial, file.digest)
            if found == file.digest:
                partial.replace(blob)
                verified.add(blob, file.digest)
                return
            damaged = partial.replace(blob.with_name(f"{blob.name}.damaged"))
            logger.warning("%s does not match the hub's hash; set aside", file.name)
            on_bytes(0)
            if is_second:
                raise damaged_error(file, found, damaged)


def fetched_bytes(blob: Path, file: HubFile) -> int:
    """Bytes of an unfinished file that are here, from which fetching it continues."""
    partial = blob.with_name(blob.name + _PARTIAL_SUFFIX)
    try:
        count = partial.stat().st_size
    except OSError:
        return 0
    return count if count <= file.num_bytes else 0


def damaged_error(file: HubFile, found: str, place: Path) -> DownloadError:
    """The error for a file whose hash is not the hub's."""
    return DownloadError(
        f"{file.name} is damaged: its hash does not match the hub's",
        where=f"expected {file.digest}, found {found}; kept as {place.name}",
        hint="localllm doctor, then again; the network, a proxy or the disk may corrupt data",
        exit_code=ExitCode.DISK,
    )


def fetch_file(
    origin: HubCommit,
    file: HubFile,
    partial: Path,
    on_bytes: Callable[[int], None] = lambda count: None,
) -> None:
    """Append to a partial file until it has all its bytes, without checking them.

    Raises: the client's errors, OSError.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import HfHubHTTPError
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers

    if partial.exists() and partial.stat().st_size > file.num_bytes:
        partial.unlink()
    on_bytes(partial.stat().st_size if partial.exists() else 0)
    url = hf_hub_url(origin.repo, file.name, revision=origin.commit, repo_type=origin.kind)
    headers = build_hf_headers()

    class Counter:
        """Stands in for the client's progress bar."""

        def __init__(self, *arguments: Any, initial: int = 0, **options: Any) -> None:
            self._count = initial
            on_bytes(initial)

        def __enter__(self) -> "Counter":
            return self

        def __exit__(self, *error: object) -> None:
            return

        def update(self, count: float = 1) -> None:
            self._count += int(count)
            if self._count > file.num_bytes:
                raise OSError(f"{file.name} has more bytes than the hub's list says")
            on_bytes(self._count)

        def close(self) -> None:
            return

    for attempt in range(_ATTEMPTS):
        try:
            place = get_hf_file_metadata(url, headers=headers)
            sent = dict(headers)
            if urlsplit(place.location).netloc != urlsplit(url).netloc:
                sent.pop("authorization", None)  # a signed address elsewhere gets no token
            with partial.open("ab") as opened:
                http_get(
                    place.location,
                    opened,
                    resume_size=opened.tell(),
                    headers=sent,
                    expected_size=file.num_bytes,
                    displayed_filename=file.name,
                    tqdm_class=Counter,
                )
            return
        except HfHubHTTPError as error:
            status = getattr(error.response, "status_code", 0)
            if status < 500 or attempt == _ATTEMPTS - 1:
                raise
        except OSError as error:
            # What has arrived is kept, unless there is more than expected.
            if error.errno is not None or attempt == _ATTEMPTS - 1:
                raise
        if partial.exists() and partial.stat().st_size > file.num_bytes:
            partial.unlink()
        now = partial.stat().st_size if partial.exists() else 0
        logger.info("%s: %d bytes so far, trying again", file.name, now)
        time.sleep(_PAUSE_S * 2**attempt)
