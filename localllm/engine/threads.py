"""The number of threads that may compute on a CPU: one for each core this process may use.

Two threads on one core share its arithmetic units and wait for each other, and threads beyond a
container's share of processor time are throttled while the others wait.
"""

import os
from dataclasses import dataclass
from pathlib import Path

# How many iterations torch's threads spin in libgomp at the end of an operator before they sleep. A
# spinning thread holds a core that other processes could use, and that the C library's threads need
# for the next operator: with 30,000, a tenth of libgomp's default, pocket gives 0.7 times as many
# tokens to 24 requests at once. With fewer, torch's own operators wait longer for each other.
_TORCH_SPINS = 2_000
_TORCH_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True)
class Threads:
    """At most `most` threads; `is_fixed`: always `most`, because the user said so."""

    most: int
    is_fixed: bool


def let_torch_sleep() -> None:
    """Make torch's idle threads give up their cores soon.

    Takes effect only before torch is imported. If the user has set one of the variables, nothing is
    changed.
    """
    if not any(os.environ.get(name) for name in _TORCH_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(_TORCH_SPINS)


def usable_cores(processors: set[int], root: Path = Path("/")) -> int:
    """The number of physical cores among `processors`, at most what control groups grant, at least
    1. `root`: the folder that the system's files are read from.
    """
    cores = {_siblings(processor, root) for processor in processors}
    return max(1, min([len(cores), *(int(granted) for granted in _granted(root))]))


def choose_threads(asked: int | None) -> Threads:
    """As many threads as asked for, or as OMP_NUM_THREADS says; else at most one per core."""
    if asked is not None:
        return Threads(asked, is_fixed=True)
    said, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")
    if said.strip().isdecimal() and int(said) > 0:
        return Threads(int(said), is_fixed=True)
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    processors = affinity(0) if affinity else set(range(os.cpu_count() or 1))
    return Threads(usable_cores(processors), is_fixed=False)


def _siblings(processor: int, root: Path) -> str:
    """The list of processors on the same core, which identifies the core."""
    path = root / f"sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list"
    return _read(path) or str(processor)


def _granted(root: Path) -> list[float]:
    """The CPU quota of each control group above this process, as a number of processors."""
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
    """The quota in `cpu.max`, "200000 100000" for two processors; None if it begins with "max"."""
    quota, _, period = (_read(group / "cpu.max") or "max").partition(" ")
    return None if quota == "max" else int(quota) / int(period)


def _quota_v1(group: Path) -> float | None:
    """The quota in `cpu.cfs_quota_us`, as a number of processors; -1 there means none."""
    quota, period = (_read(group / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
    return int(quota) / int(period) if quota and period and int(quota) > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
