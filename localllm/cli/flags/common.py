"""Arguments and flags that several commands take one by one, not in a group."""

from typing import Annotated

import typer

from localllm.cli.flags import suggestions
from localllm.cli.flags.groups import option

Model = Annotated[
    str, typer.Argument(help="Alias, org/name or folder.", autocompletion=suggestions.models)
]
OptionalModel = Annotated[
    str | None,
    typer.Argument(
        help="Alias, org/name or folder.", show_default=False, autocompletion=suggestions.models
    ),
]
JsonObject = Annotated[bool, typer.Option("--json", help="One JSON object.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
# As JsonObject, but a variable or a setting can set it too.
JsonResult = Annotated[bool, option("--json", help="One JSON object.")]
Everything = Annotated[bool, typer.Option("--all", help="All of them.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")]
