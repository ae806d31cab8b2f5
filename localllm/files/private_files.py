"""Files and folders of this user alone: what localllm keeps, trusts later, or writes for a user.

Anyone who can write to such a folder could put code there that is loaded, or keys and values that
an answer is computed from; anyone who can read it could read conversations. So a folder is used
only if the user owns it and nobody else can write to it, and everything in it is for the user
alone, whatever the umask says.
"""

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import BinaryIO

from localllm.files.regular_file import open_descriptor, open_regular, read_bounded

logger = logging.getLogger(__name__)

# Suffix of a file that is being written, or that a killed process left behind.
PART_SUFFIX = ".part"
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_OF_OTHERS, _WRITE_OF_OTHERS = 0o077, 0o022


def make_private_folder(path: Path) -> None:
    """Make a folder and its missing parents; close an existing one to other users.

    Raises: OSError, also for another user's folder, or one that stays writable by others.
    """
    for folder in (*reversed(path.parents), path):
        if folder.is_dir():
            continue
        try:
            folder.mkdir(_FOLDER_MODE)
        except FileExistsError:  # another process was faster, or it is not a folder
            continue
        with suppress(OSError):  # some file systems have no modes
            folder.chmod(_FOLDER_MODE)  # the umask may have removed more
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _close_to_others(descriptor, path)
    finally:
        os.close(descriptor)


def private_folder(path: Path, without: str) -> Path | None:
    """`path` as `make_private_folder` leaves it; None if that raises.

    In that case one warning says so, with `without`: what follows from the lack of the folder.
    """
    try:
        make_private_folder(path)
    except OSError as error:
        _warn_once(without, path, error.strerror or str(error))
        return None
    return path


def open_private(path: Path) -> BinaryIO:
    """Open a file to read its bytes.

    Raises: OSError, whose text says why, also for a file that another user owns or can write to,
    since it may have been changed already.
    """
    file = open_regular(path)
    try:
        _check_own(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def read_private(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file. Raises: as `open_private`; OSError for more than `max_bytes`."""
    with open_private(path) as file:
        return read_bounded(file, path, max_bytes)


def private_descriptor(path: Path, flags: int) -> int:
    """A descriptor to append to a file, or to let SQLite open it: the file is created if it does
    not exist, and closed to other users if it does. `flags` are those of `os.open`.

    Raises: OSError, whose text says why, also for anything but a regular file, a dangling link, and
    another user's file.
    """
    try:
        made = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    except FileExistsError:
        pass
    else:
        _set_mode(made, _FILE_MODE)  # the umask may have removed more
        return made
    descriptor = open_descriptor(path, flags)
    try:
        _close_to_others(descriptor, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


@contextmanager
def new_private(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name, and replaces an existing one, when the block succeeds.

    Raises: OSError.
    """
    descriptor, name = tempfile.mkstemp(suffix=PART_SUFFIX, dir=path.parent)
    aside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _set_mode(descriptor, _FILE_MODE)  # the umask may have removed more
            yield file
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_private(path: Path, data: bytes) -> None:
    """Write a file completely or not at all, replacing an existing one. Raises: OSError."""
    with new_private(path) as file:
        file.write(data)


def write_new(path: Path, data: bytes) -> None:
    """Write a new file, completely or not at all. Raises: FileExistsError, OSError."""
    # From here on nobody else can take the name, and no existing file is replaced.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE))
    try:
        write_private(path, data)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _close_to_others(descriptor: int, path: Path) -> None:
    """Raises: OSError for another user's file or folder, or one that stays writable by others."""
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & _OF_OTHERS:
        # A file that the user has made read-only stays so.
        _set_mode(descriptor, stat.S_IMODE(status.st_mode) & _FOLDER_MODE)
        status = os.fstat(descriptor)
    _check_own(status, path)


def _set_mode(descriptor: int, mode: int) -> None:
    with suppress(OSError):  # some file systems have no modes
        os.fchmod(descriptor, mode)


def _check_own(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", str(path))
    if status.st_mode & _WRITE_OF_OTHERS:
        raise OSError(errno.EPERM, "other users can write to it", str(path))


@cache
def _warn_once(without: str, path: Path, reason: str) -> None:
    logger.warning("%s: %s: %s", without, path, reason)
