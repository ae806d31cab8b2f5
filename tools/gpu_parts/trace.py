"""What the GPU does in a decode step, from a profiler trace: launches, gaps, idle time."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from localllm.bench.results import percentile
from localllm.engine.engine import Engine
from localllm.schedule.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Span:
    """A kernel or a copy on the device; times in microseconds."""

    name: str
    start_us: float
    end_us: float


def trace_decode(engine: Engine, batch: int, num_steps: int) -> list[Span]:
    """Trace the GPU during `num_steps` decode steps of `batch` running requests."""
    from torch.profiler import ProfilerActivity, profile

    params = SamplingParams(temperature=0.0, max_tokens=num_steps + 24, ignore_eos=True)
    for i in range(batch):
        engine.add_request([i], params)
    for _ in range(16):  # prefill, first steps, graph captures
        engine.step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    while engine.has_unfinished():
        engine.step()
    return sorted(
        (
            Span(event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if event.device_type.name == "CUDA"
        ),
        key=lambda span: span.start_us,
    )


def _short(name: str) -> str:
    """The name of a kernel without its arguments, as `at::native::gather` or `nvjet_sm90_tst`."""
    name = name.removeprefix("void ").replace("(anonymous namespace)::", "")
    return name if name.startswith("Mem") else re.split(r"[<(]", name, maxsplit=1)[0]


def summarize(spans: Sequence[Span], num_steps: int, num_layers: int) -> dict[str, Any]:
    """Launches per step and per layer, the share of idle time, gaps, and the time of each kernel,
    from when it begins to wait for the one before. `spans` are sorted by start.
    """
    if not spans:
        return {"launches": 0}
    kernels = [span for span in spans if not span.name.startswith(("Memcpy", "Memset"))]
    gaps, end = [], spans[0].end_us
    for span in spans[1:]:
        gaps.append(max(0.0, span.start_us - end))
        end = max(end, span.end_us)
    whole = end - spans[0].start_us
    by_name: Counter[str] = Counter()
    for span in spans:
        by_name[_short(span.name)] += span.end_us - span.start_us  # type: ignore[assignment]
    return {
        "launches": len(kernels),
        "launches_a_step": len(kernels) / num_steps,
        "launches_a_layer": len(kernels) / num_steps / num_layers,
        "step_us": whole / num_steps,
        "idle_share": sum(gaps) / whole,
        "gap_us": {"p50": percentile(gaps, 0.5), "p99": percentile(gaps, 0.99)} if gaps else {},
        "us_a_step": {name: us / num_steps for name, us in by_name.most_common(12)},
    }
