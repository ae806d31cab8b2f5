"""When a model was used last: the access time of its config.json."""

import os
import time
from pathlib import Path


def note_use(folder: Path) -> None:
    """It is used now. File systems that are mounted so do not note it themselves."""
    path = folder / "config.json"
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except OSError:
        return  # somebody else's, or on a disk that is only read


def last_use(folder: Path) -> float | None:
    """Seconds since the epoch; None where that is not known."""
    try:
        return (folder / "config.json").stat().st_atime
    except OSError:
        return None
