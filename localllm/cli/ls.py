"""`localllm ls`: the models on this machine."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from localllm.cli.output import json_line, note, show_controls, write_stdout


def ls(
    json_output: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """List the models on this machine: the built-in ones and those in the hub's cache."""
    from localllm.local_models import find_local_models

    found = find_local_models()
    for warning in found.warnings:
        note(f"warning: {show_controls(warning)}")
    if json_output:
        for model in found.models:
            write_stdout(json_line(asdict(model)))
        return
    rows = [
        (
            model.name,
            _size(model.num_bytes),
            _age(model.last_used_s),
            "ready" if model.problem is None else model.problem,
        )
        for model in found.models
    ]
    header = ("MODEL", "SIZE", "USED", "STATE")
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(3)]
    for row in (header, *rows):
        name, size, used, state = row
        line = f"{name:{widths[0]}}  {size:>{widths[1]}}  {used:{widths[2]}}  {state}"
        write_stdout(show_controls(line.rstrip()) + "\n")


def _size(num_bytes: int) -> str:
    """Bytes in the unit that leaves one to three digits before the point."""
    size, unit = float(num_bytes), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.0f} {unit}" if unit in ("B", "kB") else f"{size:.1f} {unit}"


def _age(last_used_s: float | None) -> str:
    """How long ago, in the largest whole unit."""
    if last_used_s is None:
        return "built in"
    age_s = max(0.0, time.time() - last_used_s)
    for unit, seconds in (("day", 86400), ("hour", 3600), ("minute", 60)):
        count = int(age_s // seconds)
        if count:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
