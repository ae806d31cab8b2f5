"""`localllm config`: the user's settings, which are the defaults of flags."""

import difflib
from pathlib import Path
from typing import Annotated, Any

import typer

from localllm.cli.draw.output import note, show_controls, write_stdout
from localllm.cli.flags import suggestions
from localllm.cli.flags.settings import settable_flags
from localllm.errors import DiskError, RequestError
from localllm.files.private_files import make_private_folder, write_private
from localllm.hub.catalog import BUILT_IN_MODELS, resolve_model
from localllm.user.places import config_file, user_catalog
from localllm.user.settings import DEFAULT_MODEL, read_settings

config = typer.Typer(
    invoke_without_command=True,
    help="Show and change settings, which apply unless a flag or a variable overrides them.",
)


# Settings whose value may be the name of a file.
_NAME_FILES = ("json_schema",)
# The kinds of value that flags take, by their names in the parser's errors.
_KINDS = {"integer": "a whole number", "number": "a number", "boolean": "true or false"}
_NAME = typer.Argument(
    help="A flag's name, or default_model.",
    show_default=False,
    autocompletion=suggestions.settings,
)


@config.callback()
def _alone(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        get(context)


@config.command("list", hidden=True)
@config.command("get")
def get(
    context: typer.Context,
    name: Annotated[str | None, _NAME] = None,
) -> None:
    """Print one setting, or all settings that are set."""
    settings = read_settings()
    if name is None:
        for key, value in settings.items():
            write_stdout(show_controls(f"{key} = {value}") + "\n")
        if not settings:
            note("nothing is set; localllm config set NAME VALUE", dim=True)
        return
    key = _known(context, name)
    if key not in settings:
        raise RequestError(
            f"{key} is not set", param="name", hint=f"localllm config set {key} VALUE"
        )
    write_stdout(show_controls(str(settings[key])) + "\n")


@config.command("set")
def set_(
    context: typer.Context,
    name: Annotated[str, _NAME],
    value: Annotated[
        str,
        typer.Argument(
            help="The new value.", show_default=False, autocompletion=suggestions.setting_values
        ),
    ],
) -> None:
    """Set one setting: `localllm config set temp 0.7`."""
    key = _known(context, name)
    document = _document()
    document[key] = _converted(context, key, value)
    _write(document)
    note(f"{key} is {document[key]}", dim=True)


@config.command("unset")
def unset(context: typer.Context, name: Annotated[str, _NAME]) -> None:
    """Remove a setting."""
    document = _document()
    key = name.lstrip("-").replace("-", "_")
    if key not in document and key.replace("_", "-") not in document:
        key = _known(context, name)
    spellings = [each for each in {key, key.replace("_", "-")} if each in document]
    if not spellings:
        raise RequestError(f"{name!r:.60} is not set", param="name", hint="localllm config get")
    for spelling in spellings:
        del document[spelling]
    _write(document)
    note(f"{key} is no longer set", dim=True)


@config.command("path")
def path(
    catalog: Annotated[
        bool, typer.Option("--catalog", help="Your own models, models.toml, instead.")
    ] = False,
) -> None:
    """Print the path of the settings file, or of your own models."""
    write_stdout(f"{user_catalog() if catalog else config_file()}\n")


def _known(context: typer.Context, name: str) -> str:
    key = name.lstrip("-").replace("-", "_")
    flags = settable_flags(context.find_root().command)
    if key in ("model", "m"):
        return DEFAULT_MODEL
    for known, commands in flags.items():
        # Any name of the flag will do.
        spellings = [each.lstrip("-") for each in next(iter(commands.values())).opts]
        if key.replace("_", "-") in spellings:
            return known
    if key not in flags and key != DEFAULT_MODEL:
        near = difflib.get_close_matches(key, [*flags, DEFAULT_MODEL], n=3)
        raise RequestError(
            f"there is no setting {name!r:.60}",
            param="name",
            where=f"nearest: {', '.join(near)}" if near else "",
            hint="a flag of `localllm chat --help`, or default_model",
        )
    return key


def _converted(context: typer.Context, key: str, value: str) -> Any:
    """`value` converted to the type of its flag. Raises: RequestError."""
    if key == DEFAULT_MODEL:
        return _placed_model(value)
    parameter = next(iter(settable_flags(context.find_root().command)[key].values()))
    try:
        converted = parameter.process_value(context, [value] if parameter.multiple else value)
    except Exception as error:  # typer's own error, which has no public name
        kind = next((words for name, words in _KINDS.items() if name in str(error)), None)
        message = f"{key} must be {kind}, found {value!r:.40}" if kind else f"{key}: {error}"
        raise RequestError(message, param="value") from error
    from localllm.cli.machine.setting_checks import CHECKS

    check = CHECKS.get(key)
    if check is not None:
        check(converted)
    return list(converted) if parameter.multiple else _placed(key, converted)


def _placed(key: str, value: Any) -> Any:
    """A value that names a file or folder, with its whole path: commands start in other folders."""
    kind, colon, name = str(value).partition(":")
    if key == "spec" and colon:
        return f"{kind}:{_placed_model(name)}"
    is_file = isinstance(value, str) and key in _NAME_FILES and Path(value).expanduser().exists()
    if isinstance(value, Path) or is_file or key == "cache_dir":
        return str(Path(value).expanduser().absolute())
    return value


def _placed_model(name: str) -> str:
    """The same model, from whatever folder a command is started. Raises: CatalogError."""
    source = resolve_model(name)
    if source.file is not None:
        place = Path(source.name)  # a link, a folder with one model, or a name of another program
        return str(place.absolute()) if place.exists() else source.name
    if source.folder is None or source.repo is not None or name in BUILT_IN_MODELS:
        return name
    is_named = source.folder.name == name and source.folder != Path(name)  # in localllm's cache
    return name if is_named else str(source.folder.expanduser().absolute())


def _document() -> Any:
    import tomlkit

    path = config_file()
    read_settings()  # raises if the file is broken, and says why
    return tomlkit.parse(path.read_text(encoding="utf-8")) if path.exists() else tomlkit.document()


def _write(document: Any) -> None:
    import tomlkit

    path = config_file()
    try:
        make_private_folder(path.parent)
        # It may hold keys. A symlink stays one: it may lead to a folder shared with other tools.
        write_private(path.resolve(), tomlkit.dumps(document).encode("utf-8", errors="replace"))
    except OSError as error:
        raise DiskError(
            f"{path} cannot be written: {error.strerror}",
            hint="check its folder's permissions, or set XDG_CONFIG_HOME to another folder",
        ) from error
