"""A look into folders of other programs, which ends however many files are in them."""

import os
from collections.abc import Iterator
from pathlib import Path

from localllm.hub.quantized_files import ENDING

# Entries of all folders of one look together.
_MOST_ENTRIES = 20_000


class StoreWalk:
    """Lists folders until it has seen a number of entries; what may not be read is left out."""

    def __init__(self, most: int = _MOST_ENTRIES) -> None:
        self._left = most

    def folders(self, folder: Path) -> list[Path]:
        """The folders in a folder, by name."""
        return [Path(entry) for entry in self._entries(folder) if _is_folder(entry)]

    def files(self, folder: Path) -> dict[Path, int]:
        """The files in a folder and their bytes, by name; links count as what they lead to."""
        found = {}
        for entry in self._entries(folder):
            try:
                if entry.is_file():
                    found[Path(entry)] = entry.stat().st_size
            except OSError:
                continue
        return found

    def gguf(self, folder: Path) -> dict[str, int]:
        """Bytes of the GGUF files in a folder and in its folders, by path below it."""
        return {
            file.relative_to(folder).as_posix(): num_bytes
            for place in (folder, *self.folders(folder))
            for file, num_bytes in self.files(place).items()
            if file.suffix.lower() == ENDING
        }

    def _entries(self, folder: Path) -> list[os.DirEntry[str]]:
        return sorted(self._scanned(folder), key=lambda entry: entry.name)

    def _scanned(self, folder: Path) -> Iterator[os.DirEntry[str]]:
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    if self._left <= 0:
                        return
                    self._left -= 1
                    if entry.name.isprintable():
                        yield entry
        except OSError:
            return


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False
