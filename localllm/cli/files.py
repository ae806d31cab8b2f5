"""Paths that a user typed, and files that are written for one."""

from pathlib import Path

from localllm.errors import DiskError, RequestError


def user_path(text: str) -> Path:
    """`text` with `~` resolved. Raises: RequestError."""
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise RequestError(f"{text!r:.200}: {error}") from error


def write_new_file(path: Path, text: str) -> None:
    """Write a file that is not there yet. Raises: RequestError where it is; DiskError."""
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except FileExistsError as error:
        raise RequestError(f"{path} is there already", hint="another name") from error
    except OSError as error:
        raise DiskError(f"{path} cannot be written: {error.strerror}") from error
