"""Files and folders that only their user may read, whatever the umask says."""

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

_FILE_MODE, _FOLDER_MODE = 0o600, 0o700
_OF_OTHERS = 0o077


def make_private_folder(folder: Path) -> None:
    """Make a folder, and what is missing above it. One that is there is closed to others, if it is
    this user's. Raises: OSError.
    """
    for each in (*reversed(folder.parents), folder):
        if each.is_dir():
            continue
        with suppress(FileExistsError):  # another process was quicker, or it is no folder
            each.mkdir(_FOLDER_MODE)
            _set_mode(each, _FOLDER_MODE)  # the umask may have taken more
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(folder))
    _close_to_others(folder, _FOLDER_MODE)


def open_private(path: Path, flags: int) -> int:
    """A descriptor of a file, which is made if it is not there; one that is there is closed to
    others. `flags` are those of `os.open`.

    Raises: OSError, also for what is no file: a folder, a FIFO, a link to nowhere.
    """
    flags |= os.O_CLOEXEC | os.O_NONBLOCK  # a FIFO must not be waited for
    try:
        descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, _FILE_MODE)
    except FileExistsError:
        check_is_file(path)
        descriptor = os.open(path, flags)
        _close_to_others(path, _FILE_MODE)
        return descriptor
    _set_mode(descriptor, _FILE_MODE)
    return descriptor


def check_is_file(path: Path) -> None:
    """Raises: OSError, with a word for what it is, where something else than a file is there."""
    if path.is_symlink() and not path.exists():
        raise FileNotFoundError(errno.ENOENT, "it is a link to nowhere", str(path))
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO" if stat.S_ISFIFO(mode) else "no file"
        raise OSError(errno.EINVAL, f"it is {kind}", str(path))


def write_private(path: Path, text: str) -> None:
    """Write a file whole or not at all, in the place of one that is there. Raises: OSError."""
    partial = path.with_name(f"{path.name}.new")
    try:
        descriptor = open_private(partial, os.O_WRONLY | os.O_TRUNC)
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        partial.replace(path)
    except OSError:
        with suppress(OSError):
            partial.unlink()
        raise


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet; of one that cannot be written whole nothing is left.

    Raises: FileExistsError, OSError.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, _FILE_MODE)
    try:
        with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
            _set_mode(descriptor, _FILE_MODE)
            file.write(text)
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _close_to_others(path: Path, mode: int) -> None:
    """Only where it is open to them: what a user has made read-only stays so."""
    found = path.stat()
    if found.st_mode & _OF_OTHERS and found.st_uid == os.getuid():
        _set_mode(path, mode)


def _set_mode(place: Path | int, mode: int) -> None:
    with suppress(OSError):  # there are file systems without modes
        os.chmod(place, mode)
