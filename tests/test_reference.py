"""What is written about the command line is what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from localllm.cli.commands import PLACES
from localllm.cli.flags.help import first_sentence
from localllm.cli.main import app
from localllm.cli.repl.slash_commands import SLASH_COMMANDS
from localllm.errors import ExitCode

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("tool", ["reference.py", "models_page.py"])
def test_the_pages_are_made_from_this_code(tool: str) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / tool), "--check"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_page_names_every_command() -> None:
    pages = [ROOT / "README.md", *(page for page in DOCS.glob("*.md") if page.name != "flags.md")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if not command.hidden:
            assert re.search(rf"localllm {name}\b|, `{name} ", text), name


def test_the_list_of_commands_has_the_first_sentence_of_the_help_of_each() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, place in PLACES.items():
        assert place.summary == first_sentence(commands[name].help)


def test_the_page_on_chat_has_every_slash_command_as_it_is_typed() -> None:
    page = (DOCS / "chat.md").read_text(encoding="utf-8")
    for command in SLASH_COMMANDS.values():
        usage = command.usage.replace("|", "\\|")
        assert f"| `{usage}` | " in page, command.usage


def test_the_page_on_exit_codes_has_each_with_its_meaning() -> None:
    page = (DOCS / "exit-codes.md").read_text(encoding="utf-8")
    for code in ExitCode:
        meaning = code.meaning.replace("|", "\\|")
        assert f"| {code.value} | {meaning} |" in page
    documented = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert documented == {int(code) for code in ExitCode}


def test_every_command_says_what_it_does_and_every_flag_too() -> None:
    def commands(group: object, path: str) -> None:
        for name, command in group.commands.items():  # type: ignore[attr-defined]
            assert command.help, f"{path} {name}"
            if hasattr(command, "commands"):
                commands(command, f"{path} {name}")
            else:
                for parameter in command.params:
                    assert parameter.help, f"{path} {name}: {parameter.name}"

    commands(typer.main.get_command(app), "localllm")
