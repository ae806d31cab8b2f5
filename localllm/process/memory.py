"""Memory of this process: how much it holds, and when it gives back what was freed."""

import ctypes
import os
from contextlib import suppress
from pathlib import Path

# From malloc.h of glibc.
_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1 << 18


def return_large_blocks() -> None:
    """Give memory blocks of 256 KiB and more back to the system as soon as they are freed.

    By default, glibc raises that size whenever a larger block is freed, to 32 MiB at most, and
    keeps what was freed in an arena for each thread. A server that has read a few bodies of
    megabytes would hold a hundred megabytes forever. Other C libraries are left as they are.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def return_freed() -> None:
    """Give all freed memory back to the system, if the C library can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    """Memory that this process holds; 0 if the system does not report it."""
    return _pages(1) * os.sysconf("SC_PAGE_SIZE")


def address_bytes() -> int:
    """Address space of this process, used or not; 0 if the system does not report it."""
    return _pages(0) * os.sysconf("SC_PAGE_SIZE")


def _pages(column: int) -> int:
    try:
        return int(Path("/proc/self/statm").read_text().split()[column])
    except (OSError, ValueError, IndexError):
        return 0
