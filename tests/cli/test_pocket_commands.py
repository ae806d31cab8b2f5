"""Every command, flag and variable that an answer of pocket names exists, and does what it says."""

import re
import shlex
import shutil
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from fake_hub import COMMIT
from server.conftest import end, start_server

from localllm.cli.main import app
from localllm.cli.repl.slash_commands import SLASH_COMMANDS
from localllm.hub.catalog import load_catalog

ROOT = Path(__file__).parents[2]
Run = Callable[..., Any]
# What no command line of ours is: words of other programs, names, and code.
OTHERS = {
    "pip install .", "pip uninstall localllm", "sudo apt install gcc", "git pull", "echo $?",
    "from localllm import LLM", 'LLM("qwen3-0.6b").chat(...)', "org/name", "@revision",
    '"stream": true', ".bin", ".pt", "models.toml", "http://127.0.0.1:8000/v1",
}  # fmt: skip
# Of the hub's client, and of the environment.
VARIABLES = {"HF_TOKEN", "HF_ENDPOINT"}
# What makes a command short enough for a test, and what ends one that asks.
MORE = {
    "chat": ["-n", "2"],
    "bench": ["-p", "8", "-n", "4", "-r", "1"],
    "quantize": ["--method", "rtn", "--no-verify"],
    "rm": ["--yes"],
    "pull": ["--dry-run"],
}


def spans() -> list[str]:
    """What stands in backticks in an answer."""
    found: set[str] = set()
    for path in sorted((ROOT / "tools/pocket/knowledge").glob("*.toml")):
        for topic in tomllib.loads(path.read_text(encoding="utf-8")).values():
            for text in (*topic.get("answers", ()), topic.get("more", "")):
                found |= set(re.findall(r"`([^`]+)`", text))
    return sorted(found - OTHERS)


SPANS = spans()
COMMANDS = [span for span in SPANS if re.search(r"\blocalllm [a-z-]", span)]
FLAGS = [span for span in SPANS if span.startswith("-")]
SLASHES = [span for span in SPANS if span.startswith("/")]
NAMES = sorted(set(SPANS) - {*COMMANDS, *FLAGS, *SLASHES})


@pytest.fixture
def models(
    tmp_path: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every repository that an answer names is in the hub's cache, and a text is in the folder."""
    cache = tmp_path / "hub"
    aliases = [name for name in load_catalog() if any(name in command for command in COMMANDS)]
    for repo in ("org/name", *(load_catalog()[alias].repo for alias in aliases)):
        root = cache / f"models--{repo.replace('/', '--')}"
        (root / "snapshots").mkdir(parents=True)
        (root / "blobs").mkdir()
        (root / "refs").mkdir()
        (root / "refs" / "main").write_text(COMMIT)
        shutil.copytree(make_checkpoint(), root / "snapshots" / COMMIT)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(cache))
    monkeypatch.chdir(tmp_path)
    for name in ("FILE", "notes.txt"):
        (tmp_path / name).write_text("The cat sat on the mat. " * 8)


@pytest.mark.slow
@pytest.mark.parametrize("span", [each for each in COMMANDS if "serve" not in each])
def test_a_command_runs(localllm: Run, models: None, tmp_path: Path, span: str) -> None:
    first, _, piped = span.partition(" | ")
    stdin = b"Hello?"
    if piped:
        stdin, span = Path(first.removeprefix("cat ")).read_bytes(), piped
    elif "--remote" in span:
        pytest.skip("with a server, below")
    words = shlex.split(span)[1:]
    command = words[0]
    if command == "rm":
        words = ["org/name" if word == "MODEL" else word for word in words]
    words = ["pocket" if word == "MODEL" else word for word in words]
    outcome = localllm(*words, *([] if "--help" in words else MORE.get(command, [])), stdin=stdin)
    assert outcome.code == 0, outcome.err


def test_a_server_opens_to_other_computers_and_is_asked_from_chat(
    localllm: Run, compiled_kernels: Path, tmp_path: Path
) -> None:
    assert "localllm serve MODEL" in COMMANDS
    assert "--host 0.0.0.0 --api-key KEY" in FLAGS
    home = tmp_path / "server"
    (home / "localllm").mkdir(parents=True)
    (home / "localllm" / "kernels").symlink_to(compiled_kernels)
    server = start_server(home, "--host", "0.0.0.0", "--api-key", "KEY")
    try:
        words = ("chat", "--remote", server.url, "Hello?", "-n", "2")
        assert localllm(*words, "--api-key", "KEY", "-m", "pocket").code == 0
        assert localllm(*words).code != 0
    finally:
        end(server)


def flags_of_all_commands() -> set[str]:
    group: Any = typer.main.get_command(app)
    commands = list(group.commands.values())
    for command in list(commands):
        commands += getattr(command, "commands", {}).values()
    return {name for each in commands for param in each.params for name in param.opts} | {"--help"}


@pytest.mark.parametrize("span", FLAGS)
def test_a_flag_exists(span: str) -> None:
    for word in span.split():
        if word.startswith("-"):
            assert word in flags_of_all_commands()


@pytest.mark.parametrize("span", SLASHES)
def test_a_command_of_the_conversation_exists(span: str) -> None:
    assert span.split()[0] in SLASH_COMMANDS


@pytest.mark.parametrize("span", NAMES)
def test_a_name_is_one_of_a_variable(span: str) -> None:
    name = span.partition("=")[0]
    assert name in VARIABLES or f"--{name.removeprefix('LOCALLLM_').lower()}" in (
        *flags_of_all_commands(),
        "--model",
    )
