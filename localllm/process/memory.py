"""Memory of this process, as the system tells."""

import os
from pathlib import Path


def resident_bytes() -> int:
    """Memory that this process holds; 0 where the system does not tell."""
    return _pages(1) * os.sysconf("SC_PAGE_SIZE")


def address_bytes() -> int:
    """Addresses that it has taken, used or not; 0 where the system does not tell."""
    return _pages(0) * os.sysconf("SC_PAGE_SIZE")


def _pages(column: int) -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[column])
    except (OSError, ValueError, IndexError):
        return 0
