"""The configurations of the kernels that were found for a GPU, kept on disk."""

import hashlib
import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path

from localllm.files.private_files import private_folder, read_private, write_private
from localllm.user.places import cache_folder
from localllm_kernels.compiling.fingerprint import sources_fingerprint, triton_version
from localllm_kernels.compiling.tiles import MAX_SPLITS, MAX_WARPS, TileConfig
from localllm_kernels.compiling.tunings import Tunings

logger = logging.getLogger(__name__)

_MAX_BYTES = 10_000_000
_WITHOUT = "tunings are not kept"


@dataclass(frozen=True, slots=True)
class TuningFile:
    """The configurations found for one GPU; a missing or damaged file counts as empty."""

    path: Path

    @classmethod
    def of(cls, device_name: str) -> "TuningFile":
        """The file for a GPU, this version of Triton, and this version of the kernels."""
        made_by = f"{triton_version()} {sources_fingerprint()}"
        digest = hashlib.sha256(made_by.encode()).hexdigest()[:12]
        name = "".join(c if c.isalnum() else "-" for c in device_name)
        return cls(cache_folder("tunings") / f"{name}-{digest}.json")

    def read(self) -> Tunings:
        """The configurations found so far."""
        if private_folder(self.path.parent, _WITHOUT) is None:
            return Tunings()
        try:
            entries = json.loads(read_private(self.path, _MAX_BYTES))
            found = {str(key): TileConfig(**values) for key, values in entries.items()}
        except FileNotFoundError:
            return Tunings()
        except (OSError, ValueError, TypeError, AttributeError) as error:
            logger.warning("%s is not used and will be rewritten: %s", self.path, error)
            return Tunings()
        return Tunings({key: config for key, config in found.items() if _is_sane(config)})

    def add(self, key: str, config: TileConfig) -> None:
        """Add one configuration; the file is read again, since it may have grown meanwhile."""
        entries = {**self.read().found, key: config}
        text = json.dumps({key: asdict(config) for key, config in entries.items()}, indent=1)
        if private_folder(self.path.parent, _WITHOUT) is None:
            return
        try:
            write_private(self.path, text.encode())
        except OSError as error:
            logger.warning("%s: %s", _WITHOUT, error)


def _is_sane(config: TileConfig) -> bool:
    """Whether a configuration is one that tuning could have found."""
    tile = (config.block_m, config.block_n, config.block_k, config.num_warps)
    return (
        all(type(number) is int and number > 0 for number in (*tile, config.num_splits))
        and all(number & (number - 1) == 0 for number in tile)
        and max(config.block_m, config.block_n) <= 512
        and config.block_k <= 4096
        and config.num_splits <= MAX_SPLITS
        and type(config.ahead) is int
        and 0 <= config.ahead <= 16
        and config.num_warps <= MAX_WARPS
    )
