"""Folders of this user alone, for what localllm keeps and trusts later on.

Who can write to such a folder could put code there that is loaded, or keys and values that an
answer is computed from. So it is used only where it is the user's own and nobody else writes to
it, and all that is in it is for the user alone, whatever the umask says.
"""

import errno
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from localllm.regular_file import open_regular, read_bounded

logger = logging.getLogger(__name__)

# Of what is being written, or was when its process was killed.
PART_SUFFIX = ".part"
_OTHERS, _OTHERS_WRITE = 0o077, 0o022


def private_folder(path: Path, without: str) -> Path | None:
    """`path` as a folder of this user alone: made where there is none, and closed to others where
    it is open to them.

    None where it is somebody else's, or cannot be had; then a warning says so once, with `without`,
    what is gone without.
    """
    try:
        _make(path)
        _close_to_others(path)
    except OSError as error:
        _warn_once(without, path, error.strerror or str(error))
        return None
    return path


def open_private(path: Path) -> BinaryIO:
    """Open a file in such a folder to read its bytes.

    Raises: OSError, whose text says why, also for a file that another user made or may change.
    """
    file = open_regular(path)
    try:
        _check_own(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def read_private(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file in such a folder. Raises: as `open_private`; OSError for a longer one."""
    with open_private(path) as file:
        return read_bounded(file, path, max_bytes)


def write_private(path: Path, data: bytes) -> None:
    """Write a file in such a folder, whole or not at all, for this user alone. Raises: OSError."""
    with new_private(path) as file:
        file.write(data)


@contextmanager
def new_private(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name, and takes another one's place, when the block has ended well.

    Raises: OSError.
    """
    descriptor, name = tempfile.mkstemp(suffix=PART_SUFFIX, dir=path.parent)
    aside = Path(name)
    try:
        os.fchmod(descriptor, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            yield file
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def _make(path: Path) -> None:
    for folder in reversed([path, *path.parents]):
        if not folder.exists():
            folder.mkdir(mode=0o700, exist_ok=True)


def _close_to_others(path: Path) -> None:
    """Raises: OSError for a folder that is not this user's, or stays open to others."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and status.st_mode & _OTHERS:
            with suppress(OSError):  # what is left of it is told below
                os.fchmod(descriptor, 0o700)
            status = os.fstat(descriptor)
        _check_own(status, path)
    finally:
        os.close(descriptor)


def _check_own(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", str(path))
    if status.st_mode & _OTHERS_WRITE:
        raise OSError(errno.EPERM, "other users may write to it", str(path))


@cache
def _warn_once(without: str, path: Path, reason: str) -> None:
    logger.warning("%s: %s: %s", without, path, reason)
