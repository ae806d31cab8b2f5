"""`localllm doctor`: what a bug report needs, and whether this machine can answer at all."""

import shutil
import sys
import textwrap
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli.draw.output import (
    is_terminal,
    json_line,
    may_use_colour,
    show_controls,
    write_stdout,
)
from localllm.cli.flags import common
from localllm.cli.flags.common import JsonLines
from localllm.errors import ExitCode, RequestError
from localllm.user.places import home_folder

if TYPE_CHECKING:
    from localllm.cli.machine.doctor_looks import Finding

# The column at which the text of a finding begins.
_INDENT = 17


def doctor(
    model: Annotated[
        str | None, common.model("With --gpu: the model whose shapes are checked.")
    ] = None,
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check the GPU's kernels now, on a model's shapes.")
    ] = False,
    json_output: JsonLines = False,
) -> int:
    """Check versions, processor, GPU, memory, disk and caches, and let the built-in model answer.

    The output can go into a bug report as it is: it contains no token, name or text of yours.
    Exits with 1 only if the answer fails; a missing GPU is not a failure.
    """
    if model is not None and not gpu:
        raise RequestError(
            "a model can only be given with --gpu",
            param="model",
            hint="localllm doctor --gpu MODEL",
        )
    from localllm.cli.machine.doctor_looks import check_gpu, look_at_all

    worst = ExitCode.OK
    for finding in check_gpu(model) if gpu else look_at_all():
        if finding.state == "bad":
            worst = ExitCode.FAILURE
        write_stdout(_json(finding) if json_output else _line(finding))
    return worst


def _json(finding: "Finding") -> str:
    return json_line(asdict(replace(finding, found=without_home(finding.found))))


def _line(finding: "Finding") -> str:
    colour = {"ok": 32, "note": 33, "bad": 31}[finding.state]
    mark = f"{finding.state:4}"
    if may_use_colour(sys.stdout):
        mark = f"\x1b[{colour}m{mark}\x1b[0m"
    found = _wrapped(show_controls(without_home(finding.found)))
    remedy = _wrapped(f"try: {finding.remedy}") if finding.remedy else ""
    line = f"{mark}  {finding.what:10} {found}\n"
    return line + (f"{'':{_INDENT}}{remedy}\n" if remedy else "")


def _wrapped(text: str) -> str:
    """`text` wrapped to the width of the terminal; unchanged if stdout is not one."""
    width = shutil.get_terminal_size().columns - _INDENT
    if not is_terminal(sys.stdout) or width < 20:
        return text
    lines = textwrap.wrap(text, width, break_on_hyphens=False)
    return f"\n{'':{_INDENT}}".join(lines)


def without_home(text: str) -> str:
    """`text` with `~` for the home folder, whose path often contains the user's name."""
    home = str(home_folder())
    return text.replace(home, "~") if len(home) > 1 else text
