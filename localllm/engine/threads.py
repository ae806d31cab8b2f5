"""How many threads may compute on a CPU: one for each core that this process may use.

Two threads on one core share its arithmetic and wait for each other, and those above a container's
share of processor time are stopped while the others wait.
"""

import os
from dataclasses import dataclass
from pathlib import Path

# How many turns of libgomp's loop torch's threads spin at the end of an operator before they sleep:
# a tenth of its own default, in which they hold a core that somebody else has work for.
_TORCH_SPINS = 30_000
_TORCH_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


@dataclass(frozen=True, slots=True)
class Threads:
    """At most so many; `is_fixed`: always so many, because somebody said so."""

    most: int
    is_fixed: bool


def let_torch_sleep() -> None:
    """Have torch's threads give their cores away soon. Holds only before torch is imported; who
    has set one of the variables is not overruled.
    """
    if not any(os.environ.get(name) for name in _TORCH_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = str(_TORCH_SPINS)


def usable_cores(processors: set[int], root: Path = Path("/")) -> int:
    """Physical cores among `processors`, at most as many as the control groups grant; at least 1.

    `root` is where the system's files hang.
    """
    cores = {_siblings(processor, root) for processor in processors}
    return max(1, min([len(cores), *(int(granted) for granted in _granted(root))]))


def choose_threads(asked: int | None) -> Threads:
    """As many as are asked for, or as OMP_NUM_THREADS says; else at most one for each core."""
    if asked is not None:
        return Threads(asked, is_fixed=True)
    said, _, _ = os.environ.get("OMP_NUM_THREADS", "").partition(",")
    if said.strip().isdecimal() and int(said) > 0:
        return Threads(int(said), is_fixed=True)
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    processors = affinity(0) if affinity else set(range(os.cpu_count() or 1))
    return Threads(usable_cores(processors), is_fixed=False)


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
