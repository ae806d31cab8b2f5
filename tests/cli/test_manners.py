"""Help, completion, and how the command behaves on terminals that can do little."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from localllm.chat.store import SessionStore
from localllm.chat.transcript import Transcript, Turn
from localllm.cli.flags import suggestions
from localllm.model.random_weights import WEIGHT_KINDS
from localllm.quantize.recipe import FILE_FORMATS, METHODS
from localllm.user.places import sessions_file

ROOT = Path(__file__).parents[2]
Run = Callable[..., Any]
COMMANDS = [
    "chat",
    "quantize",
    "eval",
    "bench",
    "pull",
    "warm",
    "ls",
    "show",
    "rm",
    "plan",
    "doctor",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_examples(localllm: Run, command: str) -> None:
    outcome = localllm(command, "--help")
    assert outcome.code == 0
    assert "Examples:" in outcome.out
    assert f"localllm {command}" in outcome.out.partition("Examples:")[2]


@pytest.mark.parametrize("command", COMMANDS)
def test_examples_are_understood(localllm: Run, command: str) -> None:
    known, _, text = localllm(command, "--help").out.partition("Examples:")
    for word in text.split():
        if word.startswith("--"):
            assert re.search(rf"{word}\b", known), word


def complete(words: str, shell: str = "bash") -> list[str]:
    """What the shell would be offered behind `words`."""
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}",
        "_LOCALLLM_COMPLETE": f"complete_{shell}",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
        "_TYPER_COMPLETE_ARGS": words,
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
    }
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; sys.argv[0] = 'localllm'\n"
            "from localllm.cli.main import app\napp(prog_name='localllm')",
        ],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    return done.stdout.split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_models(shell: str) -> None:
    assert "plan" in " ".join(complete("localllm pl", shell))
    offered = " ".join(complete("localllm chat qwen3-8", shell))
    assert "qwen3-8b" in offered
    assert "llama" not in offered


def test_what_is_on_this_machine_is_offered_too(
    user_directories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (user_directories / "hub" / "models--me--mine").mkdir(parents=True)
    assert suggestions.models("me/") == ["me/mine"]
    (tmp_path / "checkpoint").mkdir()
    monkeypatch.chdir(tmp_path)
    assert suggestions.models("./check") == ["./checkpoint/"]
    assert suggestions.models(f"{tmp_path}/check") == [f"{tmp_path}/checkpoint/"]


def test_sessions_and_gpus_are_offered() -> None:
    assert suggestions.sessions("") == []
    store = SessionStore(sessions_file())
    store.create(Transcript("pocket", None, [Turn("Why?")]), "reasons")
    store.create(Transcript("pocket", None, [Turn("How?")]))
    store.create(Transcript("pocket", None, [Turn("Where?")]), "two words")
    assert suggestions.sessions("") == ["3", "2", "reasons"]
    assert suggestions.sessions("r") == ["reasons"]
    assert suggestions.gpus("rtx-409") == ["rtx-4090", "rtx-4090-laptop"]


def test_a_long_help_has_its_flags_in_sections_with_their_choices(localllm: Run) -> None:
    text = localllm("chat", "--help").out
    titles = re.findall(r"^([A-Z][a-z ]+):$", text, re.MULTILINE)
    assert titles == [
        "Arguments",
        "Model and prompt",
        "Answer",
        "Answer format",
        "Lines",
        "Conversation",
        "Sampling",
        "Engine",
        "Drafts",
        "Options",
    ]
    options = text.partition("Options:")[2].partition("Examples:")[0]
    assert options.split()[:2] == ["-h,", "--help"]  # no flag is in no section
    drafters = "auto|ngram|head|eagle:HEAD|draft:MODEL|off"
    for choices in ("auto|torch|triton", "auto|cuda|cpu", drafters):
        assert choices in text


def test_the_list_of_commands_has_whole_sentences_and_other_names(localllm: Run) -> None:
    text = localllm("--help").out
    assert "..." not in text.partition("Commands:")[2]
    assert "chat, run" in text
    assert "ls, list" in text
    assert localllm("list").out == localllm("ls").out


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("localllm chat --spec ", {"ngram", "off"}),
        ("localllm chat --think ", {"low", "high"}),
        ("localllm config set rend", {"render"}),
        ("localllm config set render ", {"auto", "blocks", "plain"}),
        ("localllm config set default_model qwen3-8", {"qwen3-8b"}),
        ("localllm plan qwen3-8b --weights ", {*WEIGHT_KINDS}),
        ("localllm bench --weights ", {*WEIGHT_KINDS}),
        ("localllm quantize qwen3-8b --method ", {*METHODS}),
        ("localllm quantize qwen3-8b --format ", {*FILE_FORMATS}),
    ],
)
def test_values_of_flags_are_completed(words: str, offered: set[str]) -> None:
    assert offered <= set(complete(words))


def test_unset_offers_what_is_set(localllm: Run) -> None:
    localllm("config", "set", "think", "low")
    assert complete("localllm config unset ") == ["think"]
