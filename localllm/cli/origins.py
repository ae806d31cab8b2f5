"""Where a flag's value comes from that was not typed: a variable, or a setting."""

from typing import Any

from localllm.user.places import config_file


def origin(parameter: Any, context: Any) -> str:
    """In words; empty for what was typed, or is the default."""
    if parameter is None or context is None:
        return ""
    source = context.get_parameter_source(parameter.name)
    kind = "" if source is None else source.name
    if kind == "ENVIRONMENT":
        return f"the variable {parameter.envvar} has it"
    return f"a setting has it: {config_file()}" if kind == "DEFAULT_MAP" else ""


def origin_of(name: str, context: Any) -> str:
    """The same of the flag that is called `name`, or whose field is; empty where none is."""
    wanted = name.lstrip("-").replace("-", "_")
    for parameter in context.command.params:
        names = [parameter.name, *(each.lstrip("-") for each in parameter.opts)]
        if wanted in (each.replace("-", "_") for each in names):
            return origin(parameter, context)
    return ""
