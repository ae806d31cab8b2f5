"""Answers in a form, and calls of tools, through OpenAI's client."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError, OpenAI
from openai.types.chat import ChatCompletion
from schemas import SCHEMAS
from server.conftest import Server
from server.tool_calling import TEMPLATES, TOOLS, tool_calling_server

from localllm.hub.checkpoint import open_checkpoint

QUESTION = [{"role": "user", "content": "How is the weather in Paris?"}]
NAMES = ["an object", "a tree", "a weather report", "either object", "a tuple", "a pattern"]


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    named = {"name": "answer", "strict": True, "schema": schema}
    return {"type": "json_schema", "json_schema": named}


def ask(client: OpenAI, is_streamed: bool, **arguments: Any) -> ChatCompletion:
    """A whole answer, or a stream put together by the client's own helper."""
    known = {"model": "pocket", "messages": QUESTION, "seed": 3, **arguments}
    if not is_streamed:
        return client.chat.completions.create(**known)
    with client.beta.chat.completions.stream(**known) as stream:
        for _ in stream:
            pass
        return stream.get_final_completion()


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_response_format_is_kept_to(client: OpenAI, name: str, is_streamed: bool) -> None:
    answer = ask(
        client,
        is_streamed,
        response_format=schema_format(SCHEMAS[name]),
        max_tokens=300,
        n=2,
    )
    for choice in answer.choices:
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), SCHEMAS[name])


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"regex": "(yes|no)[.!]"}, "(yes|no)[.!]"),
        ({"choice": ["red", 'a "quoted" one']}, 'red|a "quoted" one'),
        ({"grammar": 'start: "it is " /[0-9]{2}/ " degrees"'}, "it is [0-9]{2} degrees"),
        ({"json": {"enum": [1, 2]}}, "1|2"),
    ],
)
def test_structured_outputs_as_of_vllm(client: OpenAI, form: dict[str, Any], expected: str) -> None:
    extra = {"structured_outputs": form}
    chat = client.chat.completions.create(model="pocket", messages=QUESTION, extra_body=extra)
    text = client.completions.create(model="pocket", prompt="So:", max_tokens=50, extra_body=extra)
    assert re.fullmatch(expected, chat.choices[0].message.content or "")
    assert re.fullmatch(expected, text.choices[0].text)
    assert (chat.choices[0].finish_reason, text.choices[0].finish_reason) == ("stop", "stop")


SPECIAL = "a<|im_end|>b"
ESCAPED = re.escape(SPECIAL)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"json": {"const": SPECIAL}}, f'"{SPECIAL}"'),
        ({"choice": [SPECIAL]}, SPECIAL),
        ({"choice": ["del \x7f", "del \x7f"]}, "del \x7f"),
        ({"regex": f"({ESCAPED}){{2}}"}, SPECIAL * 2),
        ({"grammar": f'start: "{SPECIAL}" /{ESCAPED}/'}, SPECIAL * 2),
    ],
)
def test_text_of_special_tokens_is_text_in_a_form(
    client: OpenAI, form: dict[str, Any], expected: str
) -> None:
    answer = client.completions.create(
        model="pocket", prompt="So:", max_tokens=60, extra_body={"structured_outputs": form}
    )
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (expected, "stop")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_form_that_a_stop_string_cuts_is_told_as_such(client: OpenAI, is_streamed: bool) -> None:
    form = {"regex": "one, two, three"}
    asked: dict[str, Any] = {
        "model": "pocket",
        "prompt": "So:",
        "stop": ["four", ", t"],
        "extra_body": {"structured_outputs": form},
    }
    if is_streamed:
        *_, last = client.completions.create(stream=True, **asked)
        choice = last.choices[0]
    else:
        choice = client.completions.create(**asked).choices[0]
        assert choice.text == "one"
    assert choice.finish_reason == "stop"
    assert choice.to_dict()["stop_reason"] == ", t"
    whole = client.completions.create(**{**asked, "stop": ["four"]}).choices[0]
    assert (whole.text, whole.finish_reason) == ("one, two, three", "stop")
    assert "stop_reason" not in whole.to_dict()


def test_a_json_object_is_one(client: OpenAI) -> None:
    ids = open_checkpoint().tokenizer.encode('"}', add_special_tokens=False)
    answer = client.chat.completions.create(
        model="pocket",
        messages=QUESTION,
        response_format={"type": "json_object"},
        logit_bias={str(i): 8 for i in ids},
        max_tokens=300,
        seed=1,
    )
    assert answer.choices[0].finish_reason == "stop"
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"response_format": schema_format(schema)}, "response_format")
        for schema in (
            {"type": "thing"},
            {"type": "array", "uniqueItems": True},
            {"$ref": "http://127.0.0.1:9/x"},
            {"properties": {f"k{i}": {} for i in range(9000)}},
            {"pattern": "("},
            {"type": "integer", "multipleOf": 215656441},
            {"pattern": "(a{900}){1000}"},
            {"properties": {f"k{i}": True for i in range(12_000)}},
        )
    ]
    + [
        ({"extra_body": {"structured_outputs": {"regex": "(a"}}}, "structured_outputs"),
        ({"extra_body": {"structured_outputs": {"grammar": "start: x"}}}, "structured_outputs"),
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_form_that_cannot_be_kept_is_refused(
    client: OpenAI, arguments: dict[str, Any], param: str, is_streamed: bool
) -> None:
    with pytest.raises(BadRequestError) as caught:
        client.chat.completions.create(
            model="pocket", messages=QUESTION, stream=is_streamed, **arguments
        )
    assert caught.value.param == param


# Each needs a server of its own; tests/text/test_tool_calls.py has the forms of all in the gate.
TOOL_FAMILIES = [
    each if each in ("hermes", "harmony") else pytest.param(each, marks=pytest.mark.slow)
    for each in sorted(TEMPLATES)
]


@pytest.fixture(scope="module", params=TOOL_FAMILIES)
def tool_server(
    request: pytest.FixtureRequest, server_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with tool_calling_server(
        request.param, server_home, tmp_path_factory.mktemp(request.param)
    ) as server:
        yield server


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_are_called_with_arguments_of_their_schema(
    tool_server: Server, is_streamed: bool
) -> None:
    client = tool_server.client()
    for choice in ("required", {"type": "function", "function": {"name": "get_traffic"}}):
        answer = ask(
            client,
            is_streamed,
            tools=TOOLS,
            tool_choice=choice,
            max_tokens=200,
        )
        [said] = answer.choices
        assert said.finish_reason == "tool_calls"
        assert not said.message.content
        assert said.message.tool_calls is not None
        [call] = said.message.tool_calls
        assert call.id
        assert call.type == "function"
        if choice != "required":
            assert call.function.name == "get_traffic"
        jsonschema.validate(json.loads(call.function.arguments), TOOLS[0]["function"]["parameters"])
        # And on with what the tool found.
        again = client.chat.completions.create(
            model="pocket",
            messages=[
                *QUESTION,
                said.message.model_dump(exclude_none=True),
                {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
            ],
            tools=TOOLS,
            tool_choice="auto",
            max_tokens=20,
        )
        assert again.choices[0].finish_reason in ("stop", "length", "tool_calls")


def test_a_call_that_is_cut_is_told_as_such_and_not_made(tool_server: Server) -> None:
    """Led to its end, it would look whole; as a text, it would be shown."""
    create = tool_server.client().chat.completions.create
    asked: dict[str, Any] = {
        "model": "pocket",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": "required",
        "max_tokens": 9,
    }
    [said] = create(**asked).choices
    assert (said.finish_reason, said.message.tool_calls) == ("length", None)
    assert not said.message.content
    pieces = [each.choices[0] for each in create(stream=True, **asked)]
    assert pieces[-1].finish_reason == "length"
    assert not any(each.delta.tool_calls or each.delta.content for each in pieces)


def test_without_need_of_a_tool_an_answer_is_text(tool_server: Server) -> None:
    client = tool_server.client()
    free = ask(client, False, temperature=0, max_tokens=20)
    none = ask(client, False, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=20)
    assert none.choices[0].message.content == free.choices[0].message.content
    auto = ask(client, False, tools=TOOLS, temperature=0, max_tokens=20)
    assert auto.choices[0].message.content or auto.choices[0].message.tool_calls
    form = schema_format({"const": "so"})
    either = ask(client, False, tools=TOOLS, response_format=form, max_tokens=200)
    message = either.choices[0].message
    assert message.tool_calls or message.content == '"so"'


def test_tools_that_cannot_be_called_are_refused(tool_server: Server) -> None:
    client = tool_server.client()

    def tool(**changes: Any) -> dict[str, Any]:
        return {"type": "function", "function": {"name": "f", "parameters": {}, **changes}}

    for tools in (
        [tool(name="a b")],
        [tool(), tool()],
        [tool(parameters={"type": "string"})],
        [tool(parameters={"properties": {"a": {"type": "thing"}}}, strict=True)],
        [tool(name=f"f{i}") for i in range(129)],
        [{"type": "web_search"}],
    ):
        with pytest.raises(BadRequestError) as caught:
            client.chat.completions.create(
                model="pocket", messages=QUESTION, tools=tools, tool_choice="auto"
            )
        assert caught.value.type == "invalid_request_error"
