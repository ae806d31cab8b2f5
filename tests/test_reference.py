"""What is written about the command line is what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import typer

from localllm.cli.main import app
from localllm.cli.slash_commands import SLASH_COMMANDS
from localllm.errors import ExitCode

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_reference_is_made_from_this_code() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "reference.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "PATH": "/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_readme_knows_every_command() -> None:
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        if not command.hidden:
            assert re.search(rf"`localllm {name}\b|, `{name} ", README), name
    for name in SLASH_COMMANDS:
        assert f"`{name}" in README, name


def test_the_readme_has_every_exit_code_with_its_meaning() -> None:
    for code in ExitCode:
        meaning = code.meaning.replace("|", "\\|")
        assert f"| {code.value} | {meaning} |" in README


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
