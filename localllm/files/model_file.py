"""The files of a model's folder, which are untrusted: each is opened here and nowhere else.

A file must be a regular file in the folder. A link may point to another name there, and from a
snapshot in the hub's cache also to a blob of the same repository, as the hub's client makes them:
another link could show a file of the user's to whoever made the folder. The models that ship with
this package may be linked, however it was installed. A path that the user gives is followed first.
"""

import os
from pathlib import Path
from typing import BinaryIO

from localllm.errors import CheckpointError, ExitCode
from localllm.files.model_folder import explain_missing
from localllm.files.regular_file import open_regular, read_regular

_PACKAGE = Path(__file__).parents[1]
_REDOWNLOAD = "download the model again"
# What a checkout without git-lfs has in the place of a large file.
_POINTER = b"version https://git-lfs.github.com/spec/"


def has_file(path: Path) -> bool:
    """Whether a model has a file of this name, even if it is a dangling link."""
    return os.path.lexists(path)


def open_model_file(path: Path) -> BinaryIO:
    """Open a file of a model's folder to read its bytes.

    Raises: CheckpointError if it is missing, not a regular file, unreadable, or lies elsewhere.
    """
    place = _find(path)
    try:
        file = open_regular(place)
    except OSError as error:
        raise _unreadable(path, error) from error
    try:
        _refuse_pointer(path, file.read(len(_POINTER)))
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def read_model_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file of a model's folder.

    Raises: as `open_model_file`, also for a file of more than `max_bytes`.
    """
    place = _find(path)
    try:
        data = read_regular(place, max_bytes)
    except OSError as error:
        raise _unreadable(path, error) from error
    _refuse_pointer(path, data)
    return data


def check_link(path: Path) -> None:
    """Raises: CheckpointError for a name in a model's folder that is a link out of it."""
    _find(path)


def follow_links(path: Path) -> Path:
    """Where the file is opened that a user names by `path`: behind links out of their folders, but
    by its name in a snapshot, since a blob of the hub's cache has none.

    Raises: CheckpointError for links that lead nowhere.
    """
    while path.is_symlink() and not _may_be_at(path, _resolved(path)):
        path = path.parent / path.readlink()
    return path


def _find(path: Path) -> Path:
    """Where a file of a model's folder lies, links resolved."""
    place = _resolved(path)
    if not _may_be_at(path, place):
        raise CheckpointError(
            f"{path.name} is a link out of the model's folder",
            where=f"{path} points to {place}",
            hint="put a copy of the file in the folder; a GGUF file can be opened by its own path",
        )
    return place


def _resolved(path: Path) -> Path:
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:  # a cycle of links
        raise CheckpointError(
            f"{path.name} cannot be found: its links lead nowhere",
            where=str(path),
            hint=_REDOWNLOAD,
        ) from error


def _may_be_at(path: Path, place: Path) -> bool:
    """Whether a file of a model's folder may lie at `place`."""
    folder = path.parent.resolve()
    # The snapshot itself, or a folder in it.
    snapshot = folder if folder.parent.name == "snapshots" else folder.parent
    repository = snapshot.parent.parent
    is_snapshot = snapshot.parent.name == "snapshots" and repository.name.startswith("models--")
    is_blob = is_snapshot and place.parent == repository / "blobs"
    is_ours = path.parent.parent == _PACKAGE
    return place.is_relative_to(folder) or is_blob or is_ours


def _refuse_pointer(path: Path, start: bytes) -> None:
    if start.startswith(_POINTER):
        raise CheckpointError(
            f"{path.name} is a pointer of git-lfs, not the file itself",
            where=str(path),
            hint=f"git lfs pull in {path.parent}, or localllm pull MODEL",
        )


def _unreadable(path: Path, error: OSError) -> CheckpointError:
    if isinstance(error, PermissionError):
        return CheckpointError(
            f"{path.name} is not readable",
            where=str(path),
            hint="check the permissions of the file and its folder",
            exit_code=ExitCode.DISK,
        )
    reason = f"{path.name} cannot be read: {error.strerror}"
    if isinstance(error, FileNotFoundError):
        explained = None if path.is_symlink() else explain_missing(path)
        if explained is not None:
            return explained
        reason = f"{path.name} is missing"
        if path.is_symlink():
            reason = f"{path.name} is a link to a file that does not exist"
    return CheckpointError(reason, where=str(path), hint=_REDOWNLOAD)
