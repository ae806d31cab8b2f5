"""Where the value of a flag comes from if it was not typed: a variable or a setting."""

from typing import Any

from localllm.user.places import config_file


def origin(parameter: Any, context: Any) -> str:
    """The origin in words; empty if the value was typed or is the default."""
    if parameter is None or context is None:
        return ""
    source = context.get_parameter_source(parameter.name)
    kind = "" if source is None else source.name
    if kind == "ENVIRONMENT":
        return f"set by the variable {parameter.envvar}"
    return f"set in {config_file()}" if kind == "DEFAULT_MAP" else ""


def origin_of(name: str, context: Any) -> str:
    """The origin of the flag or field called `name`; empty if there is none."""
    wanted = name.lstrip("-").replace("-", "_")
    for parameter in context.command.params:
        names = [parameter.name, *(each.lstrip("-") for each in parameter.opts)]
        if wanted in (each.replace("-", "_") for each in names):
            return origin(parameter, context)
    return ""
