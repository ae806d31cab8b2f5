"""The memory of the machine, without torch."""

import os
from pathlib import Path


def available_bytes() -> int:
    """What programs could take without swapping; half of all memory where no system says."""
    try:
        # Free pages alone would leave out the file cache.
        lines = Path("/proc/meminfo").read_text().splitlines()
        [available] = [line for line in lines if line.startswith("MemAvailable:")]
        return int(available.split()[1]) * 1024
    except (OSError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
