"""Decide what the words after `chat` are: a model, a prompt, or files."""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from localllm.cli.input.text_files import is_pattern
from localllm.errors import RequestError
from localllm.hub.catalog import (
    is_file,
    is_gguf_file,
    is_model_name,
    looks_like_model,
    unknown_model,
)
from localllm.user.settings import default_model


@dataclass(frozen=True, slots=True)
class Choice:
    """The model and the prompt; None if not given. `is_said`: whether the arguments name the
    model, rather than the environment or the settings.
    """

    model: str | None
    prompt: str | None
    is_said: bool


def split_files(given: Sequence[str], words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Files for the prompt, and the other words. A shell that expands `-f src/*.py` leaves the
    first file after `-f` and puts the others among the words. `-` is stdin, which is read anyway.
    """
    files = [name for name in given if name != "-"]
    if not files:
        return [], list(words)
    is_another = [
        (is_file(word) and not is_gguf_file(word)) or (is_pattern(word) and not is_model_name(word))
        for word in words
    ]
    files += [word for word, is_one in zip(words, is_another, strict=True) if is_one]
    others = [word for word, is_one in zip(words, is_another, strict=True) if not is_one]
    if len(others) > 1 and not is_model_name(others[0]):
        suffix = Path(others[0]).suffix
        if suffix and suffix in (Path(name).suffix for name in files):
            raise RequestError(f"there is no file {others[0]!r:.200}", param="file")
    return files, others


def choose_model_and_prompt(
    words: Sequence[str],
    model_flag: str | None,
    prompt_flag: str | None,
    *,
    is_remote: bool = False,
) -> Choice:
    """Decide which word is the model: the first of two; a single one only if it is the name of a
    local model and no server is asked.

    Raises: RequestError if an argument and a flag give the same thing; CatalogError for a single
    word that looks like a model's name but is not one.
    """
    if len(words) > 2:
        raise RequestError(
            f"expected at most a model and a prompt, found {len(words)} words",
            hint=f"quote the prompt: localllm chat {shlex.quote(' '.join(words))}",
        )
    first, second = (*words, None, None)[:2]
    model, prompt = model_flag, prompt_flag
    if first is not None and second is not None:
        if model_flag is not None or prompt_flag is not None:
            raise RequestError(
                "the model or the prompt is given twice", hint="leave out -m, -p or one word"
            )
        model, prompt = first, second
    elif first is not None:
        _refuse_file(first)
        is_model = is_model_name(first) and not is_remote
        if model_flag is None and (prompt_flag is not None or is_model):
            model = first
        elif prompt_flag is None:
            prompt = first
            if model_flag is None and not is_remote and looks_like_model(first):
                raise unknown_model(
                    first, f"localllm plan lists models; as a question: -p {shlex.quote(first)}"
                )
        else:
            raise RequestError("the model or the prompt is given twice", hint="leave out -m or -p")
    if model is not None and not model.strip():
        raise RequestError("the name of the model is empty", hint="localllm plan lists models")
    named = model if is_remote else model or default_model()
    return Choice(named, prompt, is_said=model is not None)


def _refuse_file(word: str) -> None:
    """Raises: RequestError for a file in place of a question or a model."""
    if is_file(word) and not is_gguf_file(word):
        raise RequestError(
            f"{word} is a file, not a question or a model",
            hint=f"-f {shlex.quote(word)} to put it before a question; a model is a folder, or a "
            "GGUF file",
        )
