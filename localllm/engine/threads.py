"""How many threads compute on a CPU: one for each core that this process may use.

Two threads on one core share its arithmetic and wait for each other, and those above a container's
share of processor time are stopped while the others spin.
"""

import os
from pathlib import Path


def usable_cores(processors: set[int], root: Path = Path("/")) -> int:
    """Physical cores among `processors`, at most as many as the control groups grant; at least 1.

    `root` is where the system's files hang.
    """
    cores = {_siblings(processor, root) for processor in processors}
    return max(1, min([len(cores), *(int(granted) for granted in _granted(root))]))


def choose_threads() -> int | None:
    """At most so many for this process; None where OMP_NUM_THREADS says it."""
    if os.environ.get("OMP_NUM_THREADS"):
        return None
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    processors = affinity(0) if affinity else set(range(os.cpu_count() or 1))
    return usable_cores(processors)


def _siblings(processor: int, root: Path) -> str:
    """The processors of its core, which stand for the core."""
    path = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
    return _read(path) or str(processor)


def _granted(root: Path) -> list[float]:
    """Processors' time that each control group above this process may use a second."""
    found = []
    mounted = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            folder, read = mounted, _quota_v2
        elif "cpu" in controllers.split(","):
            folder, read = mounted / controllers, _quota_v1
            if not folder.is_dir():
                folder = mounted / "cpu"
        else:
            continue
        own = Path(path.lstrip("/"))
        quotas = (read(folder / group) for group in (own, *own.parents))
        found += [quota for quota in quotas if quota is not None]
    return found


def _quota_v2(group: Path) -> float | None:
    """`cpu.max` is "200000 100000" for two processors, or begins with "max"."""
    quota, _, period = (_read(group / "cpu.max") or "max").partition(" ")
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(group: Path) -> float | None:
    """Minus one stands for none."""
    quota, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
