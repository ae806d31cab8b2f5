"""Files and folders of this user alone: what localllm keeps, trusts later on, or writes for a user.

Who can write to such a folder could put code there that is loaded, or keys and values that an
answer is computed from; who can read it could read conversations. So a folder is used only where it
is the user's own and nobody else writes to it, and all that is in it is for the user alone,
whatever the umask says.
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

# Of what is being written, or was when its process was killed.
PART_SUFFIX = ".part"
_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_OF_OTHERS, _WRITE_OF_OTHERS = 0o077, 0o022


def make_private_folder(path: Path) -> None:
    """Make a folder, and what is missing above it; close one that is there to others.

    Raises: OSError, also for a folder of another user, or one that stays open to others' writing.
    """
    for folder in (*reversed(path.parents), path):
        if folder.is_dir():
            continue
        try:
            folder.mkdir(_FOLDER_MODE)
        except FileExistsError:  # another process was quicker, or it is no folder
            continue
        with suppress(OSError):  # there are file systems without modes
            folder.chmod(_FOLDER_MODE)  # the umask may have taken more
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _close_to_others(descriptor, path)
    finally:
        os.close(descriptor)


def private_folder(path: Path, without: str) -> Path | None:
    """`path` as `make_private_folder` leaves it; None where it raises.

    Then a warning says so once, with `without`, what is gone without.
    """
    try:
        make_private_folder(path)
    except OSError as error:
        _warn_once(without, path, error.strerror or str(error))
        return None
    return path


def open_private(path: Path) -> BinaryIO:
    """Open a file to read its bytes.

    Raises: OSError, whose text says why, also for a file that another user made or may change, as
    it may have been changed already.
    """
    file = open_regular(path)
    try:
        _check_own(os.fstat(file.fileno()), path)
    except OSError:
        file.close()
        raise
    return file


def read_private(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file. Raises: as `open_private`; OSError for a longer one."""
    with open_private(path) as file:
        return read_bounded(file, path, max_bytes)


def private_descriptor(path: Path, flags: int) -> int:
    """A descriptor to append to a file, or to let SQLite open it: the file is made if it is not
    there, and closed to others if it is. `flags` are those of `os.open`.

    Raises: OSError, whose text says why, also for what is no regular file, a link to nowhere, and a
    file of another user.
    """
    try:
        made = os.open(path, flags | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    except FileExistsError:
        pass
    else:
        _set_mode(made, _FILE_MODE)  # the umask may have taken more
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
    """A file that gets its name, and takes another one's place, when the block has ended well.

    Raises: OSError.
    """
    descriptor, name = tempfile.mkstemp(suffix=PART_SUFFIX, dir=path.parent)
    aside = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            _set_mode(descriptor, _FILE_MODE)  # the umask may have taken more
            yield file
        aside.replace(path)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise


def write_private(path: Path, data: bytes) -> None:
    """Write a file whole or not at all, in the place of one that is there. Raises: OSError."""
    with new_private(path) as file:
        file.write(data)


def write_new(path: Path, data: bytes) -> None:
    """Write a file that is not there yet, whole or not at all. Raises: FileExistsError, OSError."""
    # Nobody else takes the name from here on, and nothing that is there is replaced.
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE))
    try:
        write_private(path, data)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _close_to_others(descriptor: int, path: Path) -> None:
    """Raises: OSError for what is not this user's, or stays open to others' writing."""
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and status.st_mode & _OF_OTHERS:
        # What a user has made read-only stays so.
        _set_mode(descriptor, stat.S_IMODE(status.st_mode) & _FOLDER_MODE)
        status = os.fstat(descriptor)
    _check_own(status, path)


def _set_mode(descriptor: int, mode: int) -> None:
    with suppress(OSError):  # there are file systems without modes
        os.fchmod(descriptor, mode)


def _check_own(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise OSError(errno.EPERM, f"it belongs to another user (uid {status.st_uid})", str(path))
    if status.st_mode & _WRITE_OF_OTHERS:
        raise OSError(errno.EPERM, "other users may write to it", str(path))


@cache
def _warn_once(without: str, path: Path, reason: str) -> None:
    logger.warning("%s: %s: %s", without, path, reason)
