"""Words that users of other programs type in the place of a command."""

from collections.abc import Callable
from typing import Any

import pytest
import typer

from localllm.cli.flags.foreign_commands import _OTHERS, _OURS, instead_of
from localllm.cli.main import app
from localllm.errors import ExitCode


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("create", "localllm quantize MODEL"),
        ("push", "hf upload"),
        ("cp", "models.toml"),
        ("download", "localllm pull MODEL"),
        ("llama-cli", "localllm chat MODEL PROMPT"),
        ("llama_bench", "localllm bench MODEL"),
        ("whoami", "hf auth login"),
        ("embed", "POST /v1/embeddings"),
        ("delete", "localllm rm MODEL"),
        ("status", "localllm doctor"),
    ],
)
def test_a_word_of_another_program_is_answered_with_ours(
    localllm: Callable[..., Any], word: str, hint: str
) -> None:
    outcome = localllm(word, "x")
    assert outcome.code == ExitCode.USAGE
    assert f"there is no command '{word}'" in outcome.err
    assert hint in outcome.err
    assert "did you mean" not in outcome.err.lower()


def test_each_hint_is_a_command_that_there_is_and_no_word_is_one() -> None:
    known = set(typer.main.get_command(app).commands)
    assert {hint.split()[0] for hint in _OURS.values()} <= known
    assert not known & {*_OURS, *_OTHERS}
    assert not {*_OURS} & {*_OTHERS}
    assert instead_of("qwixx") is None


def test_a_misspelt_command_is_still_told_the_nearest(localllm: Callable[..., Any]) -> None:
    assert "Did you mean 'quantize'" in localllm("quantise_", "x").err
