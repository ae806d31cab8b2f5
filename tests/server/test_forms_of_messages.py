"""The forms in which clients write the same: parts, thoughts, nulls, empty arguments."""

import json
import time
from typing import Any

import pytest
from server.prompts_of import PromptServer

from localllm.errors import TemplateError
from localllm.text.template_manners import TemplateManners

TEMPLATE = (
    '{% if tools %}{{ tools | tojson }} <tool_call>\n{"name": N, "arguments": A}\n</tool_call>'
    "{% endif %}{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.arguments | tojson }}]{% endfor %}"
    "{% endfor %}"
)
STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@pytest.fixture(scope="module")
def served() -> PromptServer:
    return PromptServer(TEMPLATE, thinking="Hm.")


def prompt_of(served: PromptServer, path: str, **body: Any) -> str:
    whole = {"model": "pocket", **({"max_tokens": 9} if path == MESSAGES else {}), **body}
    response = served.post(path, whole)
    assert response.status_code == 200, response.text
    # Without a word about it there are no thoughts in Anthropic's API.
    return served.prompt.removesuffix("<think>\n\n</think>\n\n")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}], "a\nb"),
        ([{"type": "output_text", "text": "a", "annotations": []}], "a"),
        ([{"type": "refusal", "refusal": "No."}], "No."),
        (
            [{"type": "thinking", "thinking": "T"}, {"type": "text", "text": "a"}],
            "<think>T</think>a",
        ),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "T"}]}], "<think>T</think>"),
        ([{"type": "reasoning", "text": "T"}, {"type": "text", "text": "a"}], "<think>T</think>a"),
        ([{"type": "reasoning", "summary": [{"text": "T"}]}], "<think>T</think>"),
        ([{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}], "a"),
        ([{"type": "text", "text": None}], ""),
        (["a", "b"], "a\nb"),
    ],
)
def test_parts_of_a_message(served: PromptServer, content: Any, text: str) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    assert prompt_of(served, CHAT, messages=said) == f"<user>Hi<assistant>{text}"


@pytest.mark.parametrize(
    "thoughts",
    [
        {"reasoning": "T"},
        {"reasoning_content": "T"},
        {"reasoning": "T", "reasoning_content": "T"},
        {"reasoning": None, "reasoning_content": "T"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "T"}]},
        {"reasoning": "T", "reasoning_details": [{"type": "reasoning.text", "text": "T"}]},
    ],
)
def test_thoughts_under_every_name(served: PromptServer, thoughts: dict[str, Any]) -> None:
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "a", **thoughts}]
    assert prompt_of(served, CHAT, messages=said) == "<user>Hi<assistant><think>T</think>a"


def test_thoughts_are_written_under_both_names(served: PromptServer) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
    message = served.post(CHAT, body).json()["choices"][0]["message"]
    assert (message["reasoning"], message["reasoning_content"]) == ("Hm.", "Hm.")
    streamed = served.post(CHAT, {**body, "stream": True}).text
    lines = [line[6:] for line in streamed.splitlines() if line.startswith("data: {")]
    deltas = [json.loads(line)["choices"][0]["delta"] for line in lines]
    assert {"reasoning": "Hm.", "reasoning_content": "Hm.", "content": "Fine."} in deltas


def test_a_refusal_is_what_the_assistant_said(served: PromptServer) -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    said = [{"role": "user", "content": "Hi"}, refused]
    assert prompt_of(served, CHAT, messages=said) == "<user>Hi<assistant>No."


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"type": "sound"}, "messages.0.content.0: a part is one of text, input_text"),
        ({"type": "text"}, "messages.0.content.0: a part of type text needs text, a text"),
        ({"type": "image_url", "image_url": {"url": "x"}}, "localllm reads only text"),
        (7, "messages.0.content.0: "),
    ],
)
def test_a_part_that_cannot_be_read_is_named(served: PromptServer, part: Any, reason: str) -> None:
    response = served.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


def test_content_that_is_neither_text_nor_parts_is_named(served: PromptServer) -> None:
    response = served.post(CHAT, {"messages": [{"role": "user", "content": 7}]})
    told = response.json()["error"]["message"]
    assert told == "messages.0.content: must be a text, a list of parts, or null"


@pytest.mark.parametrize("arguments", ["", "null", " ", None, "{}", {}])
def test_empty_arguments_are_an_empty_object(served: PromptServer, arguments: Any) -> None:
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": arguments}}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call]}]
    assert prompt_of(served, CHAT, messages=said) == "<user>Hi<assistant>[{}]"
    item = {"type": "function_call", "call_id": "x", "name": "f", "arguments": arguments}
    asked = [{"role": "user", "content": "Hi"}, item]
    assert prompt_of(served, RESPONSES, input=asked) == "<user>Hi<assistant>[{}]"
    if isinstance(arguments, str):
        return
    used = [{"type": "tool_use", "id": "x", "name": "f", "input": arguments}]
    begun = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": used}]
    assert prompt_of(served, MESSAGES, messages=begun) == "<user>Hi<assistant>[{}]"


NULLS = {
    "type": "object",
    "properties": {"a": {"type": "string", "description": None, "enum": None}, "b": None},
    "required": None,
    "additionalProperties": None,
    "$defs": None,
}
PLAIN = '{"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}'


def test_null_is_absent_in_a_tool_of_every_api(served: PromptServer) -> None:
    hi = [{"role": "user", "content": "Hi"}]
    described = {"name": "f", "description": None, "parameters": NULLS, "strict": None}
    for path, body in {
        CHAT: {
            "messages": hi,
            "tools": [{"type": "function", "function": described}],
            "tool_choice": None,
            "parallel_tool_calls": None,
        },
        RESPONSES: {"input": hi, "tools": [{"type": "function", **described}], "include": None},
        MESSAGES: {
            "messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}],
            "tools": [
                {"name": "f", "description": None, "input_schema": NULLS, "cache_control": None}
            ],
            "tool_choice": {"type": "auto", "disable_parallel_tool_use": None},
            "system": None,
        },
    }.items():
        prompt = prompt_of(served, path, **body)
        assert PLAIN in prompt, path
        assert '"description"' not in prompt


def test_null_is_absent_in_the_form_of_an_answer(served: PromptServer) -> None:
    hi = [{"role": "user", "content": "Hi"}]
    form = {"type": "json_schema", "json_schema": {"name": "f", "schema": NULLS, "strict": None}}
    assert prompt_of(served, CHAT, messages=hi, response_format=form) == "<user>Hi"


def test_results_come_before_the_text_beside_them(served: PromptServer) -> None:
    used = {"type": "tool_use", "id": "x", "name": "f", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "x", "content": None, "is_error": None}
    said = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": [used]},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And?"}, {**result, "content": "12"}],
        },
    ]
    prompt = prompt_of(served, MESSAGES, messages=said)
    assert prompt == "<user>Hi<assistant>[{}]<tool>12<user>And?"
    said[2] = {"role": "user", "content": [result]}
    assert prompt_of(served, MESSAGES, messages=said) == "<user>Hi<assistant>[{}]<tool>"


SAID = [{"role": "developer", "content": "b"}, {"role": "user", "content": "c"}]
FIRST = {"role": "system", "content": "a"}
LATER = [{"role": "system", "content": "b"}, SAID[1]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [FIRST, *SAID]}),
        ("/tokenize", {"messages": [FIRST, *SAID]}),
        (RESPONSES, {"instructions": "a", "input": SAID}),
        ("/v1/responses/input_tokens", {"instructions": "a", "input": SAID}),
        (MESSAGES, {"system": "a", "messages": LATER}),
        ("/v1/messages/count_tokens", {"system": "a", "messages": LATER}),
    ],
)
def test_a_change_is_told_in_a_header(path: str, body: dict[str, Any]) -> None:
    served = PromptServer(STRICT)
    limit = {"max_tokens": 9} if path == MESSAGES else {}
    response = served.post(path, {"model": "pocket", **limit, **body})
    assert response.status_code == 200, response.text
    told = "system messages at the beginning are one, or the user's"
    assert response.headers["warning"] == f'299 - "changed: {told}"'
    if path in (CHAT, MESSAGES, RESPONSES):
        assert served.prompt == "<system>a\n\nb<user>c"


def test_nothing_is_told_of_what_the_template_takes(served: PromptServer) -> None:
    said = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    assert "warning" not in served.post(CHAT, {"messages": said}).headers


def test_a_template_that_takes_its_time_is_asked_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it is not asked it is taken to take."""
    monkeypatch.setattr("localllm.text.template_manners._ASKING_S", 0.05)
    num_asked = 0

    def render(messages: Any, tools: Any) -> str:
        nonlocal num_asked
        num_asked, end = num_asked + 1, time.thread_time() + 0.02
        while time.thread_time() < end:
            pass
        raise TemplateError("no")

    manners = TemplateManners(render, None, has_tools=True)
    asked = [name for name in dir(TemplateManners) if name.startswith("takes_")]
    assert all(getattr(manners, name) for name in asked)
    assert num_asked <= 7


def test_a_pause_does_not_make_a_template_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiling it, or a collection of garbage, changes no answer."""
    monkeypatch.setattr("localllm.text.template_manners._ASKING_S", 0.2)
    num_asked = 0

    def render(messages: Any, tools: Any) -> str:
        nonlocal num_asked
        num_asked, end = num_asked + 1, time.thread_time() + (0.3 if num_asked < 3 else 0)
        while time.thread_time() < end:
            pass
        if messages[0]["role"] == "system":
            raise TemplateError("no")
        return " ".join(str(each["content"]) for each in messages)

    manners = TemplateManners(render, None, has_tools=False)
    assert manners.takes_neighbours
    assert not manners.takes_system
    assert not manners.takes_systems
    assert not manners.takes_only_system
