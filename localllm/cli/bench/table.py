"""The results of `localllm bench` as tables: one per suite, with a bar where a limit is known."""

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from localllm.bench.report import Report
from localllm.bench.results import Result, Spread
from localllm.cli.draw.columns import aligned

BAR_CELLS = 10
_EIGHTHS = " ▏▎▍▌▋▊▉█"

Column = tuple[str, Callable[[Result], str]]


def report_text(report: Report, width: int | None = None) -> str:
    """The whole report, for a terminal of `width` columns, or for a pipe if `width` is None."""
    model, place = report.model, report.environment
    if "url" in model:
        lines = [f"{model['name']} at {model['url']}"]
    elif "kernels" in model:
        lines = [f"{model['kernels']} kernels at the sizes of {model['name']}", place["device"]]
    else:
        lines = [
            f"{model['name']}, {model['weights']} weights, {model['dtype']}, "
            f"{model['operators']} operators, {_bytes(model['weight_bytes'])} per step",
            f"{place['device']}, {place['threads']} thread{'s' * (place['threads'] != 1)}",
        ]
    if report.limits is not None:
        rates = [f"memory {_bytes(report.limits.memory_bytes_per_s)}/s"]
        rates += [
            f"{name} {rate / 1e9:,.0f} billion operations/s"
            for name, rate in report.limits.operations_per_s.items()
        ]
        lines.append("limits measured alongside: " + ", ".join(rates))
    if width is not None:
        lines = [part for line in lines for part in textwrap.wrap(line, width)]
    for suite in dict.fromkeys(result.suite for result in report.results):
        rows = [result for result in report.results if result.suite == suite]
        lines += ["", *_table(_COLUMNS[suite], rows, width)]
    return "\n".join(lines) + "\n"


def _table(columns: Sequence[Column], rows: Sequence[Result], width: int | None) -> list[str]:
    """The lines of a table; if one would be too long, verdicts go below their rows."""
    cells = [[name for name, _ in columns], *([get(row) for _, get in columns] for row in rows)]
    lines = aligned(cells)
    if width is None or max(map(len, lines)) <= width or columns[-1] is not _VERDICT:
        return lines
    head, *body = _table(columns[:-1], rows, None)
    lines = [head]
    for row, line in zip(rows, body, strict=True):
        indent = 4 * " "
        below = textwrap.wrap(row.verdict, width, initial_indent=indent, subsequent_indent=indent)
        lines += [line, *below]
    return lines


def bar(share: float) -> str:
    """`share` as a bar of ten cells, in eighths of a cell; full at 1 and above."""
    eighths = round(max(0.0, min(1.0, share)) * BAR_CELLS * 8)
    whole, part = divmod(eighths, 8)
    drawn = _EIGHTHS[8] * whole + (_EIGHTHS[part] if part else "")
    return drawn.ljust(BAR_CELLS, "·")


def _spread(value: Any, format_one: Callable[[float], str]) -> str:
    if not isinstance(value, Spread):
        return format_one(value)
    return f"{format_one(value.median)} ({format_one(value.min)} to {format_one(value.max)})"


def _speed(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"


def _share(value: float) -> str:
    return f"{value:.0%}"


def _bytes(count: float) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def _condition(name: str) -> Column:
    def shown(row: Result) -> str:
        value = row.conditions.get(name, "")
        return value if isinstance(value, str) else f"{value:,}"

    return name, shown


def _found(header: str, name: str, format_one: Callable[[float], str]) -> Column:
    return header, lambda row: _spread(row.found[name], format_one) if name in row.found else ""


def _times(row: Result) -> str:
    if "ttft_s" in row.found and not isinstance(row.found["ttft_s"], dict):
        return "first token " + _time(row.found["ttft_s"].median)
    pace = row.found.get("time_per_token_s")
    return "" if pace is None else f"token {_time(pace['p50'])}, p99 {_time(pace['p99'])}"


def _percentiles(header: str, name: str) -> Column:
    def get(row: Result) -> str:
        value = row.found.get(name)
        return "" if value is None else f"{_time(value['p50'])}, {_time(value['p99'])}"

    return f"{header} p50, p99", get


_TEST: Column = ("test", lambda row: row.test)
_VERDICT: Column = ("", lambda row: row.verdict)
_BAR: Column = ("limit", lambda row: bar(row.found["share_of_limit"]))
_TOKENS = _found("tokens/s", "tokens_per_s", _speed)

_COLUMNS: dict[str, tuple[Column, ...]] = {
    "start-up": (
        _TEST,
        _found("imports", "imports_s", _time),
        _found("weights", "weights_s", _time),
        _found("first step", "first_step_s", _time),
        _VERDICT,
    ),
    "speed": (
        _TEST,
        _condition("depth"),
        _condition("batch"),
        _TOKENS,
        ("time", _times),
        _BAR,
        _VERDICT,
    ),
    "load": (
        _TEST,
        _TOKENS,
        _percentiles("first token", "ttft_s"),
        _percentiles("token", "time_per_token_s"),
        _percentiles("total", "total_s"),
    ),
    "batching": (_TEST, _TOKENS, _VERDICT),
    "python": (
        _TEST,
        _found("Python", "python_s", _time),
        _found("step", "step_s", _time),
        _VERDICT,
    ),
    "prefix": (_TEST, _VERDICT),
    "paging": (_TEST, _VERDICT),
    "contended": (
        _TEST,
        _condition("pairs"),
        _found("alone", "alone_tokens_per_s", _speed),
        _TOKENS,
        _found("kept", "kept", lambda value: f"{value:.2f}"),
        _VERDICT,
    ),
    "compare": (
        _TEST,
        _condition("batch"),
        _TOKENS,
        _found("theirs", "their_tokens_per_s", _speed),
        _VERDICT,
    ),
    "speculation": (
        _TEST,
        _condition("drafters"),
        _condition("batch"),
        _found("without", "plain_tokens_per_s", _speed),
        _found("with drafts", "tokens_per_s", _speed),
        ("tokens per step", lambda row: f"{row.found['tokens_per_step']:.2f}"),
        ("accepted", lambda row: _share(row.found["accepted"])),
        _VERDICT,
    ),
    "suffix index": (
        _TEST,
        _found("build", "build_s", _time),
        _found("add and look up a token", "look_up_s", _time),
        _found("memory", "bytes", _bytes),
        _VERDICT,
    ),
    "verify": (_TEST, _condition("prompts"), _VERDICT),
    "operators": (
        _TEST,
        _condition("rows"),
        _found("time", "seconds", _time),
        ("rate", lambda row: f"{row.found['bytes_per_s'] / 1e9:.1f} GB/s"),
        _BAR,
        _VERDICT,
    ),
}
