"""The recommended model for this machine: one for each memory size, the same everywhere."""

import os
from pathlib import Path

from localllm.hub.catalog import CatalogEntry, recommended

_GPU_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


def has_gpu_driver() -> bool:
    """Whether there may be a GPU, as far as can be seen without loading torch."""
    return any(Path(driver).exists() for driver in _GPU_DRIVERS)


def recommended_here(device: str = "auto") -> CatalogEntry | None:
    """The recommended model for this machine; torch is loaded only if there may be a GPU."""
    if device != "cpu" and has_gpu_driver():
        import torch

        if torch.cuda.is_available():
            return recommended("gpu", torch.cuda.get_device_properties(0).total_memory)
    return recommended("cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
