"""What localllm keeps in its cache folder, by kind; all of it can be recreated."""

import fcntl
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from localllm.errors import DiskError
from localllm.user.places import cache_folder, prefix_folder


@dataclass(frozen=True, slots=True)
class CacheKind:
    """A cache folder and what it holds."""

    name: str
    meaning: str
    folder: Path

    def num_bytes(self) -> int:
        """Bytes that the files in the folder take."""
        num_bytes = 0
        for root, _, names in os.walk(self.folder):
            for name in names:
                with suppress(OSError):  # deleted meanwhile
                    status = (Path(root) / name).lstat()
                    # Of a header without its model most bytes are a hole.
                    num_bytes += min(status.st_size, 512 * status.st_blocks)
        return num_bytes

    def clear(self) -> None:
        """Delete the folder. Raises: DiskError, also if a quantization is running in it."""
        for lock in self.folder.glob("*.unfinished/lock"):
            if lock.is_file() and _is_held(lock):
                raise DiskError(
                    f"a quantization is running in {lock.parent.name}",
                    where=f"process {lock.read_text().strip() or 'unknown'}",
                    hint="wait for it, or stop it",
                )
        try:
            if self.folder.exists():
                shutil.rmtree(self.folder)
        except OSError as error:
            raise DiskError(
                f"{self.folder} cannot be deleted: {error.strerror or error}",
                hint="check its permissions, and that no localllm is running",
            ) from error


def _is_held(lock: Path) -> bool:
    with lock.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
    return False


def cache_kinds(prefixes: str | None) -> list[CacheKind]:
    """All kinds, the most expensive to recreate first; `prefixes`: the folder chosen for them, if
    any.
    """
    meanings = {
        "quantized": "models that were quantized here",
        "prefixes": "keys and values of prompts, for --cache-disk",
        "tunings": "which kernel sizes are fastest on this GPU",
        "self-checks": "which kernels work on this GPU, and how fast",
        "key-codings": "how models' keys become codes of 4 bits, for --kv-cache-dtype int4",
        "kernels": "the C kernels, compiled for this processor",
        "gguf": "configs and vocabularies of GGUF files, which a start reads in less time",
        "gguf-headers": "headers of GGUF models that were planned or shown, and not downloaded",
        "downloads": "which downloaded files were checked against their hashes",
    }
    folders = {name: cache_folder(name) for name in meanings}
    folders["prefixes"] = prefix_folder(prefixes)
    return [CacheKind(name, meaning, folders[name]) for name, meaning in meanings.items()]
