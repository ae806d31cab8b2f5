"""A record of verified downloads, so that a file is hashed once and the hub is asked once.

One small JSON file in the cache folder; losing it costs only the time to check again.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from localllm.files.private_files import private_folder, read_private, write_private
from localllm.files.regular_file import open_regular
from localllm.user.places import cache_folder

_CHUNK = 1 << 22
_MAX_BYTES = 100_000_000


class VerifiedFiles:
    """Files whose content was checked against its hash, and snapshots that have all their files.

    A file is identified by path, size and modification time.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path or cache_folder("downloads") / "verified.json"

    def knows(self, file: Path, digest: str) -> bool:
        """Whether `file` was found to have this hash and has not changed since."""
        known = self._read()["files"].get(str(file.resolve()))
        return known == [digest, *_stamp(file)]

    def add(self, file: Path, digest: str) -> None:
        """Record that `file` has this hash."""
        real = file.resolve()
        self._change(lambda known: known["files"].update({str(real): [digest, *_stamp(real)]}))

    def is_complete(self, snapshot: Path, *, with_weights: bool) -> bool:
        """Whether all requested files of a snapshot are there, with weights if `with_weights`."""
        names = self._read()["snapshots"].get(str(snapshot))
        if not isinstance(names, list) or (
            with_weights and not any(str(name).endswith(".safetensors") for name in names)
        ):
            return False
        return all((snapshot / str(name)).exists() for name in names)

    def add_snapshot(self, snapshot: Path, names: list[str]) -> None:
        """Record that a snapshot has these files, in addition to those recorded before."""

        def add(known: dict[str, dict[str, Any]]) -> None:
            earlier = known["snapshots"].get(str(snapshot), [])
            known["snapshots"][str(snapshot)] = sorted({*earlier, *names})

        self._change(add)

    def chosen(self, snapshot: Path, tag: str | None) -> Path | None:
        """The first file of the GGUF model that a tag, or none, was found to mean in a snapshot;
        None if that is not known, or if not all of its files are here.
        """
        names = self._read()["snapshots"].get(_choice(snapshot, tag))
        if not isinstance(names, list) or not names:
            return None
        files = [snapshot / str(name) for name in names]
        return files[0] if all(file.exists() for file in files) else None

    def add_choice(self, snapshot: Path, tag: str | None, names: list[str]) -> None:
        """Record which files of a snapshot a tag, or none, means."""
        self._change(lambda known: known["snapshots"].update({_choice(snapshot, tag): names}))

    def _read(self) -> dict[str, dict[str, Any]]:
        empty: dict[str, dict[str, Any]] = {"files": {}, "snapshots": {}}
        try:
            found = json.loads(read_private(self._path, _MAX_BYTES))
        except (OSError, ValueError):
            return empty
        if not isinstance(found, dict):
            return empty
        return {name: found[name] if isinstance(found.get(name), dict) else {} for name in empty}

    def _change(self, change: Callable[[dict[str, dict[str, Any]]], None]) -> None:
        from filelock import FileLock

        if private_folder(self._path.parent, "verified downloads are not recorded") is None:
            return
        try:
            with FileLock(f"{self._path}.lock", mode=0o600):
                known = self._read()
                change(known)
                write_private(self._path, json.dumps(known).encode())
        except OSError:
            return  # the record is optional


def _choice(snapshot: Path, tag: str | None) -> str:
    return f"{snapshot}:{(tag or '').upper()}"


def _stamp(file: Path) -> list[int]:
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def hash_file(file: Path, digest: str, on_bytes: Callable[[int], None] = lambda count: None) -> str:
    """The hash of a file, of the same kind as `digest`: 64 hexadecimal digits are SHA-256, 40 are
    the SHA-1 of git's blob.
    """
    if len(digest) == 40:
        hasher = hashlib.sha1(f"blob {file.stat().st_size}\0".encode())
    else:
        hasher = hashlib.sha256()
    with open_regular(file) as opened:
        while chunk := opened.read(_CHUNK):
            hasher.update(chunk)
            on_bytes(len(chunk))
    return hasher.hexdigest()
