"""Opens files that someone else may have made, and only regular files.

Opening a named pipe waits for a writer, and a device may never end. So a file is opened without
waiting, and its type is checked on the open descriptor, not on its name.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_descriptor(path: Path, flags: int) -> int:
    """A descriptor of an existing file. `flags` are those of `os.open`.

    Raises: OSError, whose text says why, also for anything but a regular file, or a dangling link.
    """
    # Checked first, since a socket cannot be opened, and opening some devices has side effects.
    try:
        _check_kind(path.stat().st_mode, path)
    except FileNotFoundError as error:
        if path.is_symlink():
            raise FileNotFoundError(errno.ENOENT, "it is a dangling link", str(path)) from error
        raise
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    try:
        _check_kind(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def open_regular(path: Path) -> BinaryIO:
    """Open a file to read its bytes. Raises: as `open_descriptor`."""
    return os.fdopen(open_descriptor(path, os.O_RDONLY), "rb")


def read_regular(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file. Raises: as `open_regular`, also for one of more than `max_bytes`."""
    with open_regular(path) as file:
        return read_bounded(file, path, max_bytes)


def read_bounded(file: BinaryIO, path: Path, max_bytes: int) -> bytes:
    """The bytes of an open file. Raises: OSError for more than `max_bytes`."""
    # The size is checked first, so that a file far too large is not read at all.
    num_bytes = os.fstat(file.fileno()).st_size
    data = file.read(max_bytes + 1) if num_bytes <= max_bytes else b""
    if num_bytes > max_bytes or len(data) > max_bytes:
        size = f"{max(num_bytes, len(data)):,} bytes, at most {max_bytes:,}"
        raise OSError(errno.EFBIG, f"it is too large: {size}", str(path))
    return data


def _check_kind(mode: int, path: Path) -> None:
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"it is {kind}, not a file", str(path))
