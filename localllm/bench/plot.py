"""Plots of a report: tokens a second over batch size, latency over load, and the roofline."""

import io
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from localllm.bench.report import Report
from localllm.bench.results import Spread
from localllm.errors import RequestError

_INCHES = (6.4, 4.0)
_ENDINGS = (".png", ".html")


def check_plot(path: Path) -> None:
    """Fail early. Raises: RequestError for an unsupported file suffix or a missing library."""
    if path.suffix not in _ENDINGS:
        raise RequestError(
            f"--plot writes {' or '.join(_ENDINGS)}, not {path.name!r:.80}", param="plot"
        )
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RequestError(
            "plots need matplotlib", param="plot", hint="pip install 'localllm[plot]'"
        ) from error


def write_plot(report: Report, path: Path) -> None:
    """Draw every plot that the report has data for. Raises: OSError."""
    from matplotlib.figure import Figure

    pictures = [draw for draw, has_data in _pictures(report) if has_data]
    figure = Figure(figsize=(_INCHES[0], _INCHES[1] * max(1, len(pictures))), layout="constrained")
    model = report.model
    figure.suptitle(
        f"{model['name']}, {model['weights']} on {report.environment['device']}", fontsize=8
    )
    for i, draw in enumerate(pictures):
        draw(report, figure.add_subplot(len(pictures), 1, i + 1))
    if path.suffix == ".png":
        figure.savefig(path, dpi=150)
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format="svg")
    svg = drawn.getvalue()
    head = "<!doctype html><meta charset=utf-8><title>localllm bench</title>"
    path.write_text(head + svg[svg.index("<svg") :], encoding="utf-8")


def _pictures(report: Report) -> list[tuple[Callable[[Report, Any], None], bool]]:
    def has(suite: str) -> bool:
        return any(result.suite == suite for result in report.results)

    return [
        (_draw_batches, has("speed") or has("batching")),
        (_draw_load, has("load")),
        (_draw_roofline, report.limits is not None and bool(_rooflined(report))),
    ]


def _draw_batches(report: Report, axes: Any) -> None:
    lines: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for result in report.results:
        if result.suite == "speed" and result.test.startswith("tg"):
            point = (result.conditions["batch"], _middle(result.found["tokens_per_s"]))
            lines[f"depth {result.conditions['depth']:,}"].append(point)
        elif result.suite == "batching" and result.test.endswith("at once"):
            point = (result.conditions["at_once"], _middle(result.found["tokens_per_s"]))
            lines["mixed requests"].append(point)
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.set(xlabel="requests at once", ylabel="tokens a second", xscale="log", ylim=(0, None))
    batches = sorted({batch for points in lines.values() for batch, _ in points})
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.minorticks_off()
    axes.legend()


def _draw_load(report: Report, axes: Any) -> None:
    rows = [
        result
        for result in report.results
        if result.suite == "load" and "requests_per_s" in result.conditions
    ]
    rates = [row.conditions["requests_per_s"] for row in rows]
    for name in ("p50", "p99"):
        axes.plot(rates, [row.found["ttft_s"][name] for row in rows], marker="o", label=name)
    axes.set(xlabel="requests a second", ylabel="time to first token, s", ylim=(0, None))
    axes.legend()


def _rooflined(report: Report) -> list[Mapping[str, Any]]:
    return [result.found for result in report.results if "intensity" in result.found]


def _draw_roofline(report: Report, axes: Any) -> None:
    limits = report.limits
    assert limits is not None
    points = _rooflined(report)
    arithmetic = points[0]["arithmetic"]
    memory = limits.memory_bytes_per_s
    # If this arithmetic has no measured rate, the fastest measured one stands in.
    peak = limits.peak(arithmetic) or max(limits.operations_per_s.values())
    least = min(found["intensity"] for found in points) / 2
    most = max(*(found["intensity"] for found in points), peak / memory) * 4
    axes.plot(
        [least, peak / memory, most],
        [least * memory / 1e9, peak / 1e9, peak / 1e9],
        color="black",
        label=f"limit ({arithmetic})",
    )
    for result in report.results:
        if "intensity" in result.found:
            speed = result.found["operations_per_s"] / 1e9
            label = " ".join([result.test, *(f"{k} {v}" for k, v in result.conditions.items())])
            axes.plot(result.found["intensity"], speed, marker="o", linestyle="", label=label)
    axes.set(xlabel="operations a byte", ylabel="billion operations a second")
    axes.set(xscale="log", yscale="log")
    axes.legend(fontsize=7)


def _middle(value: float | Spread) -> float:
    return value.median if isinstance(value, Spread) else value
