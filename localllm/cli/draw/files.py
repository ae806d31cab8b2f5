"""Paths that a user typed, and files written for the user."""

import errno
import shlex
from pathlib import Path

from localllm.errors import DiskError, RequestError
from localllm.files.private_files import write_new


def user_path(text: str) -> Path:
    """`text` with `~` resolved. Raises: RequestError, also for an empty path: it would be the
    current folder, and is what a variable that is not set leaves.
    """
    if not text.strip():
        raise RequestError("the path is empty", hint="check the variable that holds it")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{text!r:.200}: {error}") from error


def write_new_file(path: Path, text: str) -> None:
    """Write a new file. Raises: RequestError if it already exists; DiskError."""
    try:
        write_new(path, text.encode("utf-8", errors="replace"))
    except FileExistsError as error:
        raise RequestError(f"{path} already exists", hint="another name") from error
    except OSError as error:
        raise cannot_write(path, error) from error


def cannot_write(path: Path, error: OSError) -> DiskError:
    """An error that says why a file could not be written, and what to do."""
    hints = {
        errno.ENOSPC: "free some space and run it again; nothing was left there",
        errno.EDQUOT: "free some space and run it again; nothing was left there",
        errno.ENOENT: f"create its folder first: mkdir -p {shlex.quote(str(path.parent))}",
    }
    hint = hints.get(error.errno or 0, "another place, or check the permissions there")
    return DiskError(f"{path} cannot be written: {error.strerror}", hint=hint)
