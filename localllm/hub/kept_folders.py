"""Folders that are made from GGUF files: where they are kept, and for how long."""

import shutil
import time
from contextlib import suppress
from pathlib import Path

from localllm.errors import CheckpointError, ExitCode
from localllm.files.file_times import last_use
from localllm.files.private_files import make_private_folder
from localllm.user.places import cache_places, runtime_folder

_KEPT_S = 30 * 24 * 3600


def private_place(kind: str) -> Path:
    """Where such folders are, by the kind of cache: the first place that can be written.

    Raises: CheckpointError (exit code 5) if there is none.
    """
    for place in cache_places(kind):
        try:
            if place.parent == runtime_folder():  # perhaps in a folder where everybody can write
                make_private_folder(place.parent)
            make_private_folder(place)
        except OSError as error:
            reason = error.strerror or str(error)
        else:
            return place
    raise CheckpointError(
        f"there is no place for what is read from a GGUF file: {reason}",
        where=", ".join(map(str, cache_places(kind))),
        hint="make one of these folders writable, or set XDG_CACHE_HOME",
        exit_code=ExitCode.DISK,
    )


def forget_unused(place: Path) -> None:
    """Remove the folders in a place that have not been used for a month: of models that are gone,
    of older versions of localllm, or of processes that were killed.
    """
    for folder in place.iterdir():
        with suppress(OSError):  # another process was faster
            if time.time() - (last_use(folder) or folder.stat().st_mtime) > _KEPT_S:
                shutil.rmtree(folder, ignore_errors=True)
