"""Flags as fields of dataclasses: what typer makes of them, and what a command gets."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from localllm.cli.chat.flags import ChatFlags
from localllm.cli.flags.groups import Flags, flag, only, setting, takes_flags
from localllm.cli.flags.help import Command
from localllm.cli.main import app as localllm_app
from localllm.user.places import config_file


@dataclasses.dataclass(frozen=True, slots=True)
class Lamp(Flags):
    section = "Light"
    exclusive = (("dark", "watts"),)

    watts: int | None = setting(None, "-w", help="How bright.")
    dark: bool = setting(False, "--dark", "--no-light", help="Not at all.")
    colour: str = flag("white", help="In what.", section="Taste")


@dataclasses.dataclass(frozen=True, slots=True)
class Room(Flags):
    section = "Space"

    lamp: Lamp
    size: float = setting(9.5, help="Square metres.")


def app_of(command: Callable[..., Any]) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None, add_completion=False)
    app.command(cls=Command)(command)
    return app


def called(
    command: Callable[..., Any], *words: str, settings: dict[str, Any] | None = None
) -> tuple[Any, ...]:
    """What the command got; `settings` as a file of them gives it."""
    got: list[Any] = []

    def keep(**groups: Any) -> None:
        got.extend(groups.values())

    vars(keep)["__signature__"] = inspect.signature(command)
    done = CliRunner().invoke(
        app_of(takes_flags(keep)), list(words), default_map=settings, catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    return tuple(got)


def flags_of(command: Callable[..., Any]) -> dict[str, Any]:
    made: Any = typer.main.get_command(app_of(takes_flags(command)))
    return {each.name: each for each in made.params}


def room(room: Room) -> None:
    """A room."""


def lamp(light: Annotated[Lamp, only("colour", "watts")]) -> None:
    """A lamp that cannot be dark."""


def test_fields_become_options_with_their_names_defaults_and_variables() -> None:
    flags = flags_of(room)
    assert list(flags) == ["watts", "dark", "colour", "size"]
    assert [flags[name].default for name in flags] == [None, False, "white", 9.5]
    assert [flags[name].opts for name in flags] == [
        ["-w", "--watts"],
        ["--dark", "--no-light"],
        ["--colour"],
        ["--size"],
    ]
    variables = ["LOCALLLM_WATTS", "LOCALLLM_DARK", None, "LOCALLLM_SIZE"]
    assert [flags[name].envvar for name in flags] == variables
    assert flags["size"].help == "Square metres."


def test_a_flag_stands_in_the_section_of_its_group_or_in_its_own() -> None:
    panels = {name: each.rich_help_panel for name, each in flags_of(room).items()}
    assert panels == {"watts": "Light", "dark": "Light", "colour": "Taste", "size": "Space"}


def test_a_command_gets_its_groups_filled() -> None:
    assert called(room) == (Room(Lamp()),)
    got = called(room, "--watts", "40", "--colour", "red", "--size", "12")
    assert got == (Room(Lamp(40, False, "red"), 12.0),)


def test_a_group_is_filled_from_variables_and_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_WATTS", "60")
    got = called(room, settings={"watts": 25, "size": 3.5})
    assert got == (Room(Lamp(60), 3.5),)


def test_of_a_group_only_some_flags_in_their_own_order() -> None:
    assert list(flags_of(lamp)) == ["colour", "watts"]
    assert called(lamp, "--watts", "5") == (Lamp(5),)
    with pytest.raises(KeyError, match="wats"):
        takes_flags(misspelt)


def misspelt(light: Annotated[Lamp, only("wats")]) -> None:
    """Names a field that is none."""


def test_what_was_typed_is_over_what_it_excludes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCALLLM_WATTS", "60")
    assert called(room, "--dark") == (Room(Lamp(None, True)),)
    assert called(room, "--watts", "5", settings={"dark": True}) == (Room(Lamp(5)),)
    # Neither was typed: the command says what it thinks of both.
    assert called(room, settings={"dark": True}) == (Room(Lamp(60, True)),)


def test_a_field_that_two_groups_have_is_refused() -> None:
    def twice(first: Lamp, second: Lamp) -> None:
        """Has everything twice."""

    with pytest.raises(TypeError, match="have a field named watts"):
        takes_flags(twice)


def test_other_parameters_and_the_context_stay() -> None:
    seen: list[Any] = []

    def build(
        context: typer.Context, name: Annotated[str, typer.Argument()], *, light: Lamp
    ) -> None:
        """Build."""
        seen.extend((context.info_name, name, light))

    done = CliRunner().invoke(app_of(takes_flags(build)), ["hut", "--dark"], prog_name="build")
    assert done.exit_code == 0, done.output
    assert seen == ["build", "hut", Lamp(dark=True)]


def test_each_flag_of_chat_is_a_field_of_one_group() -> None:
    def names(kind: Any) -> list[str]:
        fields = dataclasses.fields(kind)
        groups = [field.type for field in fields if not field.metadata]
        own = [field.name for field in fields if field.metadata]
        return own + [name for group in groups for name in names(group)]

    chat: Any = typer.main.get_command(localllm_app)
    flags = [each.name for each in chat.commands["chat"].params if each.name != "words"]
    assert flags == names(ChatFlags)
    assert len(set(flags)) == len(flags)


def test_a_file_of_settings_reaches_a_group(localllm: Callable[..., Any]) -> None:
    config_file().parent.mkdir(parents=True, exist_ok=True)
    config_file().write_text("spec-ngram = '3'\n")
    outcome = localllm("chat", "hi", "-n", "1")
    assert "--spec-ngram must be like 2:8, found '3'" in outcome.err
    assert f"set in {config_file()}" in outcome.err
