"""The flags that settings give defaults to."""

import difflib
from collections.abc import Mapping
from typing import Any

import typer

from localllm.errors import CatalogError, ExitCode
from localllm.user.places import config_file
from localllm.user.settings import DEFAULT_MODEL


def flag_defaults(group: Any, settings: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The settings as defaults for every command with a flag of that name.

    Raises: CatalogError (exit code 2) for a name that no command's flag has.
    """
    if not settings:
        return {}
    flags = settable_flags(group)
    for key in settings:
        if key not in flags and key != DEFAULT_MODEL:
            near = difflib.get_close_matches(key, [*flags, DEFAULT_MODEL], n=1)
            raise CatalogError(
                f"unknown setting {key!r:.60}" + (f"; did you mean {near[0]!r}?" if near else ""),
                where=str(config_file()),
                hint=f"localllm --no-config config unset {key}",
                exit_code=ExitCode.USAGE,
            )
    return {
        command: {
            flags[key][command].name: value
            for key, value in settings.items()
            if command in flags.get(key, {})
        }
        for command in group.commands
    }


def setting_names(context: typer.Context) -> list[str]:
    """The names of all settings, spelled as users type them."""
    flags = settable_flags(context.find_root().command)
    return sorted({DEFAULT_MODEL, *(name.replace("_", "-") for name in flags)})


def flag_of(context: typer.Context, name: str) -> Any:
    """The flag whose default the setting gives; None if no flag has that name."""
    commands = settable_flags(context.find_root().command).get(name.lstrip("-").replace("-", "_"))
    return next(iter(commands.values())) if commands else None


def settable_flags(group: Any) -> dict[str, dict[str, Any]]:
    """The flags that a variable can set, by name; for each, the parameter of every command."""
    found: dict[str, dict[str, Any]] = {}
    for command, each in group.commands.items():
        for parameter in each.params:
            if isinstance(parameter.envvar, str):
                key = parameter.envvar.removeprefix("LOCALLLM_").lower()
                found.setdefault(key, {})[command] = parameter
    return found
