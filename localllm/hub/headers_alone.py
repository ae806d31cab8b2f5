"""Fetches the headers of GGUF models from the hub, without their weights: what a plan needs.

A header lies at the beginning of its file: some megabytes, most of them vocabulary. Here it stands
in a file of the full size that is empty otherwise, a hole that takes no space. Nothing loads
weights from there: it is no place of models.
"""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from localllm.files.gguf import holds_header
from localllm.hub.kept_folders import forget_unused, private_place
from localllm.hub.snapshot import HubSnapshot
from localllm.hub.transfer import HubCommit, HubFile, fetch_file

# A folder of the cache.
HEADERS = "gguf-headers"
_FIRST_LOOK_BYTES = 1 << 20


def fetch_headers(snapshot: HubSnapshot) -> Path:
    """The first file of a GGUF model of the hub, with its header alone, as the others beside it.

    Raises: CheckpointError for a header that is broken, and (5) where there is no place for it; the
    client's errors, OSError.
    """
    headers = private_place(HEADERS)
    folder = headers / snapshot.origin.commit
    folder.mkdir(exist_ok=True)
    os.utime(folder)  # it is used
    forget_unused(headers)
    for file in snapshot.files:
        place = folder / file.name
        if not place.exists():
            place.parent.mkdir(parents=True, exist_ok=True)
            _fetch_header(snapshot.origin, file, place, headers)
    return folder / snapshot.files[0].name


def _fetch_header(origin: HubCommit, file: HubFile, place: Path, headers: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="new-", dir=headers) as folder:
        begun = Path(folder) / place.name
        next_look = _FIRST_LOOK_BYTES

        def look(num_bytes: int) -> None:
            """Look for the header's end each time that twice as much is here, so that the looks
            take no longer than one at the end.
            """
            nonlocal next_look
            if num_bytes >= next_look:
                next_look = 2 * num_bytes
                if holds_header(begun):
                    raise _EnoughError

        with suppress(_EnoughError):
            fetch_file(origin, file, begun, look)
        os.truncate(begun, file.num_bytes)
        begun.rename(place)


class _EnoughError(Exception):
    """The header is complete."""
