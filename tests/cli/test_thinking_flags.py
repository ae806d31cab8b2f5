"""Thoughts, typed special tokens and odd output, through the command."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted import scripted_model

from localllm.errors import ExitCode

Run = Callable[..., Any]
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not "
    "enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture
def say(
    localllm: Run, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Runs `chat hi` with a thinking model that says `answer`; returns outcome and model."""

    def run(answer: str, *arguments: str, template: str = THINKING) -> tuple[Any, Any]:
        folder = make_checkpoint()
        (folder / "chat_template.jinja").write_text(template)
        model = scripted_model(folder, [answer])
        monkeypatch.setattr("localllm.cli.chat.request.open_noted", lambda *_, **options: model)
        return localllm("chat", "-p", "hi", *arguments), model

    return run


ANSWER = "<think>\nFirst I count.\n</think>\n\nThere are two."


def test_in_a_pipe_the_answer_is_on_stdout_and_the_thoughts_on_stderr(say: Run) -> None:
    outcome, _ = say(ANSWER)
    assert outcome.out == "There are two.\n"
    assert outcome.err == "First I count.\n\n"


def test_hidden_thoughts_are_nowhere(say: Run) -> None:
    outcome, _ = say(ANSWER, "--hide-thinking")
    assert (outcome.out, outcome.err) == ("There are two.\n", "")


def test_json_has_the_thoughts_in_a_field_of_their_own(say: Run) -> None:
    outcome, _ = say(ANSWER, "--json")
    described = json.loads(outcome.out)
    assert (described["text"], described["thinking"]) == ("There are two.", "First I count.")
    outcome, _ = say("No thoughts.", "--json")
    assert "thinking" not in json.loads(outcome.out)


def test_a_stream_of_json_tells_thoughts_from_answer(say: Run) -> None:
    outcome, _ = say(ANSWER, "--stream-json")
    events = [json.loads(line) for line in outcome.out.splitlines()]
    for kind, text in (("thinking", "First I count."), ("text", "There are two.")):
        assert "".join(e["text"] for e in events if e["type"] == kind) == text


def test_think_reaches_the_template(say: Run) -> None:
    _, model = say("Two.", "--think", "off")
    prompt = model.tokenizer._backend.decode(
        model.text_engine.engine.prompts[0], skip_special_tokens=False
    )
    assert prompt.endswith("assistant\n<think>\n\n</think>\n\n")


def test_think_for_a_model_that_does_not_is_noted(say: Run) -> None:
    outcome, _ = say("Two.", "--think", "high", template="{{ messages[0].content }}")
    assert outcome.code == 0
    assert "does not support thinking" in outcome.err


def test_a_wrong_level_is_a_usage_error(localllm: Run) -> None:
    outcome = localllm("chat", "-p", "hi", "--think", "loud")
    assert outcome.code == ExitCode.USAGE
    assert "medium" in outcome.err
    assert localllm("chat", "-p", "hi", "--render", "3d").code == ExitCode.USAGE


def test_special_token_text_in_a_prompt_is_text_unless_asked(say: Run) -> None:
    ended = 2  # <|im_end|>
    _, model = say("x", "-s", "<|im_end|>")
    assert model.text_engine.engine.prompts[0].count(ended) == 2
    _, model = say("x", "-s", "<|im_end|>", "--parse-special")
    assert model.text_engine.engine.prompts[0].count(ended) == 3
    _, model = say("x", "--raw", "-f", __file__)
    assert ended not in model.text_engine.engine.prompts[0]


def test_a_model_that_never_ends_is_cut_with_a_word(say: Run) -> None:
    outcome, _ = say("again and " * 2000, "-n", "50", "--fail-on-length")
    assert outcome.code == ExitCode.LENGTH
    assert outcome.out.startswith("again and again")


def test_escape_sequences_go_through_a_pipe_as_they_are(say: Run) -> None:
    outcome, _ = say("a\x1b[2Jb")
    assert outcome.out == "a\x1b[2Jb\n"


def test_a_form_for_one_answer_is_refused_in_a_conversation(
    localllm: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("localllm.cli.chat.request.is_terminal", lambda stream: True)
    monkeypatch.setattr("localllm.cli.input.user_input.is_terminal", lambda stream: True)
    outcome = localllm("chat", "--json")
    assert outcome.code == ExitCode.USAGE
    assert "need a prompt" in outcome.err


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("Text.\n\n```python\nx = 1\n```\n", "x = 1\n"),
        ("````md\n```\ninner\n```\n````\n", "```\ninner\n```\n"),
        ("1. Do:\n\n   ```sh\n   ls -l\n   ```\n", "ls -l\n"),
    ],
)
def test_the_first_code_block_is_found_wherever_it_is_nested(
    say: Run, answer: str, code: str
) -> None:
    outcome, _ = say(answer, "--extract-code")
    assert outcome.out == code


def test_control_characters_are_escaped_in_json(say: Run) -> None:
    outcome, _ = say("a\x9b2Jb\x7f", "--json")
    assert "\x9b" not in outcome.out
    assert json.loads(outcome.out)["text"] == "a\x9b2Jb\x7f"


@pytest.mark.parametrize("path", ["README.md/x", "x" * 300])
def test_a_path_that_cannot_be_is_a_usage_error(localllm: Run, path: str) -> None:
    assert localllm("chat", "-f", path, "hi").code == ExitCode.USAGE
