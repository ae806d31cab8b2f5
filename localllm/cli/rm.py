"""`localllm rm`: delete models from this machine."""

from typing import Annotated

import typer

from localllm.cli import suggestions
from localllm.cli.output import note
from localllm.cli.terminal import may_delete
from localllm.cli.words import size


def rm(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Names as `localllm ls` shows them.", autocompletion=suggestions.removable
        ),
    ],
    yes: Annotated[bool, typer.Option("-y", "--yes", help="Do not ask.")] = False,
) -> None:
    """Delete models: downloaded ones, and those that were quantized here.

    Files that another revision uses too stay, and are not counted. Checkpoints elsewhere and
    built-in models are not touched.
    """
    from localllm.local_models import plan_removal

    removals = [plan_removal(name) for name in models]
    freed = size(sum(removal.freed_bytes for removal in removals))
    names = ", ".join(removal.name for removal in removals)
    if not may_delete(names, yes, freed):
        return
    for removal in removals:
        removal.carry_out()
    note(f"deleted {names}; freed {freed}")
