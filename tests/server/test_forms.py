"""How a body asks for a form, under the names of several servers; and what is said of others."""

import json
from typing import Any

import pytest
from forms import admits
from pydantic import ValidationError

from localllm.errors import RequestError
from localllm.server.messages_schema import MessagesRequest
from localllm.server.refusals import describe_invalid
from localllm.server.responses_schema import ResponseRequest
from localllm.server.schema import ChatRequest, CompletionRequest, Sampling
from localllm.text.grammar import Grammar

SAID = [{"role": "user", "content": "Hi"}]
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
CLOSED = {**NUMBER, "additionalProperties": False}
GBNF = 'root ::= "n=" num  # a number\nnum  ::= [0-9]+ | "none"'


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate_json(json.dumps({"messages": SAID, **fields}))


def form_of(body: Sampling) -> Grammar:
    form = body.given()["grammar"]
    assert isinstance(form, Grammar)
    return form


FORMS: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": {"type": "json_object"}}, '{"a":[1,2]}', "[1]"),
    ({"response_format": {"type": "json_object", "schema": CLOSED}}, '{"n":1}', '{"m":1}'),
    ({"response_format": {"type": "json_object", "schema": None}}, '{"m":1}', "1"),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": CLOSED}}},
        '{"n":1}',
        '{"n": 1}',
    ),
    ({"response_format": {"type": "json_schema", "schema": CLOSED}}, '{"n":1}', '{"m":1}'),
    ({"response_format": {"type": "regex", "pattern": "a|b"}}, "a", "c"),
    ({"response_format": {"type": "grammar", "grammar": GBNF}}, "n=12", "12"),
    ({"structured_outputs": {"json": CLOSED}}, '{"n":1}', '{"m":1}'),
    ({"structured_outputs": {"json": json.dumps(CLOSED)}}, '{"n":1}', '{"m":1}'),
    ({"structured_outputs": {"grammar": GBNF}}, "n=none", "none"),
    ({"structured_outputs": {"grammar": 'start: "a" | "b"'}}, "a", "c"),
    ({"guided_json": CLOSED}, '{"n":1}', '{"m":1}'),
    ({"guided_json": json.dumps(CLOSED)}, '{"n":1}', '{"m":1}'),
    ({"guided_choice": ["red", "blue"]}, "red", "green"),
    ({"guided_regex": "[a-c]+"}, "abc", "abd"),
    ({"guided_grammar": GBNF}, "n=1", "1"),
    ({"json_schema": CLOSED}, '{"n":1}', '{"m":1}'),
    ({"grammar": GBNF}, "n=1", "1"),
    ({"regex": "[a-c]+"}, "abc", "abd"),
    ({"ebnf": GBNF}, "n=1", "1"),
    ({"format": "json"}, '{"a":null}', '"a"'),
    ({"format": CLOSED}, '{"n":1}', '{"m":1}'),
]


@pytest.mark.parametrize(("fields", "valid", "invalid"), FORMS, ids=str)
def test_a_form_is_understood_under_the_names_of_several_servers(
    fields: dict[str, Any], valid: str, invalid: str
) -> None:
    for body in (chat(**fields), CompletionRequest.model_validate({"prompt": "a", **fields})):
        form = form_of(body)
        assert admits(form, valid)
        assert not admits(form, invalid)
        assert body.grammar_field == next(iter(fields))
        assert body.unknown == []


@pytest.mark.parametrize(
    ("source", "valid", "invalid"),
    [
        ('root ::= item+\nitem ::= "- " [^\\n]+ "\\n"', "- a b\n- c\n", "- a b"),
        ('root ::= ("a" | "b"){2,3} "\\x21"?', "abb!", "a"),
        ("root ::= [\\]^a-]+ ws [é-ü]\nws ::= [ \\t]*", "]-^a ö", "b ö"),
        ('root ::= expr\nexpr ::= "(" expr ")" | [0-9]', "((7))", "((7)"),
        ('# first\nroot  ::= (\n  "x" # here\n  | other-rule\n)\nother-rule ::= "y"', "y", "z"),
    ],
)
def test_gbnf_means_what_it_means_to_llama_cpp(source: str, valid: str, invalid: str) -> None:
    form = form_of(chat(grammar=source))
    assert admits(form, valid)
    assert not admits(form, invalid)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ('root ::= "a', "GBNF"),
        ("root ::= other", "other"),
        ('expr ::= "a"', "root"),
        ("root ::= " + "(" * 20_000, "nested"),
        ('root ::= "' + "a" * 70_000 + '"', "65,536 bytes"),
    ],
)
def test_what_is_no_gbnf_is_told_as_such(source: str, reason: str) -> None:
    with pytest.raises(RequestError, match=reason) as caught:
        chat(grammar=source).given()
    assert caught.value.param == "grammar"


def refused(body: type[Any], fields: dict[str, Any]) -> str:
    told = json.dumps(fields).encode()
    with pytest.raises(ValidationError) as caught:
        body.model_validate_json(told)
    return describe_invalid(caught.value, told).message


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"guided_regex": "a", "regex": "b"}, "guided_regex and regex cannot be combined"),
    ({"structural_tag": {}}, "structural_tag: not supported"),
    ({"guided_json": "{"}, "guided_json: must be a JSON schema"),
    ({"response_format": {"type": "xml"}}, "response_format: "),
    ({"format": "yaml"}, "format: "),
    # Of a value that may be of several kinds, what is wrong with the kind that it is.
    ({"stop": ["a"] * 65}, "stop: List should have at most 64 items"),
    ({"stop": ["a", ""]}, "stop.1: String should have at least 1 character"),
    ({"stop": "a" * 300}, "stop: String should have at most 256 characters"),
    ({"stop": 7}, "stop: "),
    ({"max_tokens": 0}, "max_tokens: Input should be greater than or equal to 1"),
    (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 7}]}]},
        "messages.0.content.0: a part of type text needs text",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "localllm reads only text",
    ),
    (
        {"tool_choice": {"type": "function", "function": {}}},
        "tool_choice.function.name: Field required",
    ),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: Field required"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs cannot set messages"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
    ({"continue_final_message": True}, "needs a last message of the assistant"),
]


@pytest.mark.parametrize(("fields", "reason"), REFUSED, ids=str)
def test_a_refusal_says_what_is_wrong_and_where(fields: dict[str, Any], reason: str) -> None:
    assert reason in refused(ChatRequest, {"messages": SAID, **fields})


def test_other_apis_say_what_is_wrong_with_the_kind_that_a_value_is() -> None:
    content = [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text"}]}]
    asked = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": content}]}
    assert "content.0.content.0.text: Field required" in refused(MessagesRequest, asked)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": 1}]}
    assert "input.0.content.0: a part of type input_text needs text" in refused(
        ResponseRequest, {"input": [item]}
    )


def test_what_is_left_open_may_be_null_or_as_others_say_it() -> None:
    taken = {"messages", "model", "tool_calls"}
    nulls = dict.fromkeys(set(ChatRequest.model_fields) - taken)
    assert chat(**nulls).given() == chat().given() == {}
    assert (
        chat(stream_options={"include_usage": None}, logprobs=False, top_logprobs=0).given() == {}
    )
    told = chat(seed=-1, max_tokens=-1, max_completion_tokens=-1, top_k=-1, top_p=0).given()
    assert told == {"seed": -1, "top_k": 0, "top_p": 1e-9}
    text = dict.fromkeys(set(CompletionRequest.model_fields) - {"prompt"})
    assert CompletionRequest.model_validate({"prompt": "a", **text}).given() == {}


def test_other_apis_take_the_same_values() -> None:
    asked: dict[str, Any] = {
        "model": "m",
        "max_tokens": 9,
        "messages": SAID,
        "top_p": 0,
        "top_k": -1,
    }
    assert MessagesRequest.model_validate(asked).given() == {
        "max_tokens": 9,
        "top_p": 1e-9,
        "top_k": 0,
    }
    told = {"input": "a", "max_output_tokens": -1, "top_p": 0.0}
    assert ResponseRequest.model_validate(told).given() == {"top_p": 1e-9}
    tool = {"type": "function", "function": {"name": "f"}}
    assert chat(tools=[tool], tool_choice="any").asked().tools.must_call


@pytest.mark.parametrize("is_several", [None, False, True])
def test_who_must_call_makes_one_call_unless_several_are_wanted(is_several: bool | None) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    allows = {}
    for choice in ("auto", "required", {"type": "function", "function": {"name": "f"}}):
        body = chat(tools=[tool], tool_choice=choice, parallel_tool_calls=is_several)
        allows[str(choice)] = body.asked().tools.makes_several
    auto, *forced = allows.values()
    assert auto == (is_several is not False)
    assert forced == [is_several is True] * 2


def test_options_of_templates_are_told_apart_from_the_switch_for_thoughts() -> None:
    asked = {"enable_thinking": False, "preserve_thinking": True, "date": "today"}
    body = chat(chat_template_kwargs=asked)
    said = body.asked()
    assert (said.think, said.variables) == ("off", {"preserve_thinking": True, "date": "today"})
    assert chat(chat_template_kwargs={"thinking": True}).asked().think == "on"
    assert chat(add_generation_prompt=False).asked().variables == {"add_generation_prompt": False}


def test_unknown_fields_are_named_wherever_they_are() -> None:
    body = chat(
        wibble=1,
        nothing=None,
        response_format={"type": "json_object", "strictly": True},
        tools=[{"type": "function", "function": {"name": "f", "wobble": [1]}}],
        messages=[{"role": "user", "content": "Hi", "mood": "good", "refusal": None}],
    )
    assert body.unknown == [
        "messages.mood",
        "response_format.strictly",
        "tools.function.wobble",
        "wibble",
    ]
    # What is written again has only what is known.
    assert body.tools is not None
    assert body.tools[0].model_dump(exclude_none=True) == {
        "type": "function",
        "function": {"name": "f"},
    }
