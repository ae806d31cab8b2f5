"""Arguments and flags that several commands take one by one, not in a group."""

from typing import Annotated, Any

import typer

from localllm.cli.flags import suggestions
from localllm.cli.flags.groups import option


def model(help: str = "Alias, org/name, folder or GGUF file.") -> Any:
    """The argument that names a model; its default is part of `help`."""
    return typer.Argument(help=help, show_default=False, autocompletion=suggestions.models)


Model = Annotated[str, model()]
OptionalModel = Annotated[str | None, model()]
JsonObject = Annotated[bool, typer.Option("--json", help="One JSON object.")]
JsonLines = Annotated[bool, typer.Option("--json", help="One JSON object per line.")]
# As JsonObject, but a variable or a setting can set it too.
JsonResult = Annotated[bool, option("--json", help="One JSON object.")]
Everything = Annotated[bool, typer.Option("--all", help="All of them.")]
Yes = Annotated[bool, typer.Option("-y", "--yes", help="Do not ask for confirmation.")]
