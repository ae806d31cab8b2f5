"""Paths that a user typed, and files that are written for one."""

import errno
import shlex
from pathlib import Path

from localllm.errors import DiskError, RequestError
from localllm.files.private_files import write_new


def user_path(text: str) -> Path:
    """`text` with `~` resolved. Raises: RequestError."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{text!r:.200}: {error}") from error


def write_new_file(path: Path, text: str) -> None:
    """Write a file that is not there yet. Raises: RequestError where it is; DiskError."""
    try:
        write_new(path, text.encode("utf-8", errors="replace"))
    except FileExistsError as error:
        raise RequestError(f"{path} is there already", hint="another name") from error
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> DiskError:
    """That a file was not written, why, and what can be done."""
    hints = {
        errno.ENOSPC: "free some space, then again; nothing was left there",
        errno.EDQUOT: "free some space, then again; nothing was left there",
        errno.ENOENT: f"make its folder first: mkdir -p {shlex.quote(str(path.parent))}",
    }
    hint = hints.get(error.errno or 0, "another place, or check the permissions there")
    return DiskError(f"{path} cannot be written: {error.strerror}", hint=hint)
