"""When a model was last used: the access time of its config.json."""

import os
import time
from pathlib import Path


def note_use(folder: Path) -> None:
    """Record that a model is used now. Many file systems are mounted without access times."""
    path = folder / "config.json"
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except OSError:
        return  # another user's file, or a read-only disk


def last_use(folder: Path) -> float | None:
    """Seconds since the epoch; None if unknown."""
    try:
        return (folder / "config.json").stat().st_atime
    except OSError:
        return None
