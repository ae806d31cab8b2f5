"""`localllm rm`: delete models from this machine."""

from typing import Annotated

import typer

from localllm.cli.draw.output import note, show_controls
from localllm.cli.draw.terminal import may_delete
from localllm.cli.draw.words import size
from localllm.cli.flags import suggestions
from localllm.cli.flags.common import Yes


def rm(
    models: Annotated[
        list[str],
        typer.Argument(
            help="Names as `localllm ls` shows them.", autocompletion=suggestions.removable
        ),
    ],
    yes: Yes = False,
) -> None:
    """Delete models: downloaded ones, and those quantized here.

    First lists what will be deleted: repository, size, folder. `org/name@revision` is one
    revision, `org/name:Q4_K_M` one GGUF model. Files that another revision also uses are kept, and
    not counted. Checkpoints elsewhere, models of other programs and built-in ones are not touched.
    """
    from localllm.hub.removal import plan_removals

    removals = plan_removals(models)
    for removal in removals:
        places = ", ".join(map(str, removal.folders))
        what = f"{removal.name}: {removal.what}, {size(removal.freed_bytes)}, {places}"
        note(show_controls(what))
    names = ", ".join(removal.name for removal in removals)
    if not may_delete(names, yes, size(sum(removal.freed_bytes for removal in removals))):
        return
    for removal in removals:
        removal.carry_out()
        note(show_controls(f"deleted {removal.name}; freed {size(removal.freed_bytes)}"))
