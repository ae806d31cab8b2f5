"""A weight file in memory: its pages are read when a view of them is used."""

import mmap
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.files.model_file import open_model_file

if TYPE_CHECKING:
    from torch import Tensor


class MappedFile:
    """All `bytes` of a file, uint8, mapped as long as a view of them is in use."""

    def __init__(self, path: Path) -> None:
        """Raises: as `open_model_file`."""
        import torch  # takes a second, and a config is read without it

        with open_model_file(path) as file:
            # A map that could be written, privately, which nobody does: torch warns of others.
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)

    def release(self) -> None:
        """Give back the memory of what was read. What is used again is read again, so nobody may
        write to a view.
        """
        if hasattr(mmap, "MADV_DONTNEED"):  # not on Windows
            self._map.madvise(mmap.MADV_DONTNEED)
