"""Threads by cores, affinity and control groups, on file trees as systems show them."""

import os
from pathlib import Path

import pytest

from localllm.engine.threads import Threads, choose_threads, let_torch_sleep, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def topology(siblings: dict[int, str]) -> dict[str, str]:
    folder = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    return {folder.format(processor): text for processor, text in siblings.items()}


FOUR_ON_TWO = topology({0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"})


def test_two_threads_of_a_core_count_once(tmp_path: Path) -> None:
    root = write(tmp_path, FOUR_ON_TWO)
    assert usable_cores({0, 1, 2, 3}, root) == 2
    assert usable_cores({0, 2}, root) == 1
    assert usable_cores({2, 3}, root) == 2


def test_a_system_that_tells_nothing_has_a_core_for_each_processor(tmp_path: Path) -> None:
    assert usable_cores({4, 5, 6}, tmp_path) == 3


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("300000 100000", 3), ("150000 100000", 1), ("20000 100000", 1)],
)
def test_a_container_grants_processor_time(tmp_path: Path, quota: str, expected: int) -> None:
    files = {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota}
    assert usable_cores(set(range(8)), write(tmp_path, files)) == expected


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/user.slice/shell",
        "sys/fs/cgroup/user.slice/cpu.max": "200000 100000",
        "sys/fs/cgroup/user.slice/shell/cpu.max": "max 100000",
    }
    assert usable_cores(set(range(8)), write(tmp_path, files)) == 2


@pytest.mark.parametrize(("quota", "expected"), [("-1", 8), ("400000", 4)])
def test_control_groups_of_the_first_version(tmp_path: Path, quota: str, expected: int) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/docker/abc\n2:memory:/docker/abc",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": quota,
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
    }
    assert usable_cores(set(range(8)), write(tmp_path, files)) == expected


def test_who_sets_the_number_is_not_overruled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_threads(None) == Threads(3, is_fixed=True)
    assert choose_threads(2) == Threads(2, is_fixed=True)
    assert os.environ["OMP_NUM_THREADS"] == "3"
    for value in ("", "many", "0"):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        chosen = choose_threads(None)
        assert not chosen.is_fixed
        assert 1 <= chosen.most <= len(os.sched_getaffinity(0))


@pytest.mark.parametrize("variable", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_who_says_how_torch_waits_is_not_overruled(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "7")
    before = dict(os.environ)
    let_torch_sleep()
    assert dict(os.environ) == before
    monkeypatch.delenv(variable)
    let_torch_sleep()
    assert int(os.environ.pop("GOMP_SPINCOUNT")) < 300_000  # libgomp's own
