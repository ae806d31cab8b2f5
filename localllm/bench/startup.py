"""The time from process start to the first token, part by part, and the peak memory."""

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path

import torch

from localllm.bench.results import Result, Suite
from localllm.bench.speed import run_prefill
from localllm.bench.subject import Subject


class StartupSuite(Suite):
    """Must run before any other suite: a first step happens only once."""

    def __init__(self, subject: Subject, imports_s: float) -> None:
        self._subject, self._imports_s = subject, imports_s
        self._first_step_s: float | None = None

    def run(self, progress: Callable[[str], None]) -> None:
        progress("first step")
        self._first_step_s = run_prefill(self._subject.engine, [0]).seconds

    def results(self) -> list[Result]:
        """One row; the memory is the peak of the whole run so far."""
        if self._first_step_s is None:
            return []
        total = self._imports_s + self._subject.load_s + self._first_step_s
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {
            "imports_s": self._imports_s,
            "weights_s": self._subject.load_s,
            "first_step_s": self._first_step_s,
            "total_s": total,
            "peak_bytes": peak,
        }
        if self._subject.device.type == "cuda":
            found["peak_device_bytes"] = torch.cuda.max_memory_allocated(self._subject.device)
        verdict = f"first token {total:.1f} s after the start; peak {peak / 1e9:.2f} GB"
        return [Result("start-up", "start-up", {}, found, verdict)]


def seconds_since_start() -> float:
    """Age of this process in seconds; 0 if the system does not report it."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, ValueError, AttributeError):
        return 0.0
