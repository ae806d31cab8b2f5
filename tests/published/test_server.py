"""A published model behind the server, asked by the official clients."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from anthropic import Anthropic
from openai import OpenAI
from server.conftest import Server, end, start_server
from transformers import AutoModel, AutoTokenizer

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "born": {"type": "integer"}},
    "required": ["name", "born"],
    "additionalProperties": False,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ABOUT = "Returns the current weather of a city."
QUESTION = "What is the weather in Paris?"
RESULT = '{"celsius": 31, "sky": "clear"}'


@pytest.fixture(scope="module")
def server(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all tests of the file."""
    flags = ("--embeddings", "--ctx", "4096", "--max-num-seqs", "4")
    server = start_server(tmp_path_factory.mktemp("home"), *flags, model=str(qwen))
    yield server
    end(server)


@pytest.fixture(scope="module")
def openai(server: Server) -> OpenAI:
    """OpenAI's client."""
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def name(openai: OpenAI) -> str:
    """What the server calls its model."""
    return openai.models.list().data[0].id


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions_call_a_tool_and_read_its_result(
    openai: OpenAI, name: str, stream: bool
) -> None:
    tool = {"name": "get_weather", "description": ABOUT, "parameters": CITY}
    asked: dict[str, Any] = {
        "model": name,
        "temperature": 0,
        "max_tokens": 200,
        "tools": [{"type": "function", "function": tool}],
    }
    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    message, reason = _chat(openai, {**asked, "messages": messages}, stream)
    [call] = message["tool_calls"]
    assert reason == "tool_calls"
    assert not message.get("content")
    assert call["function"]["name"] == "get_weather"
    assert "Paris" in json.loads(call["function"]["arguments"])["city"]
    result = {"role": "tool", "tool_call_id": call["id"], "content": RESULT}
    message, reason = _chat(openai, {**asked, "messages": [*messages, message, result]}, stream)
    assert reason == "stop"
    assert "31" in message["content"]


def _chat(openai: OpenAI, asked: dict[str, Any], stream: bool) -> tuple[dict[str, Any], str]:
    """The message of an answer, and why it ended."""
    if not stream:
        [choice] = openai.chat.completions.create(**asked).choices
        return choice.message.model_dump(exclude_none=True), choice.finish_reason
    with openai.chat.completions.stream(**asked) as events:
        for _ in events:
            pass
        [choice] = events.get_final_completion().choices
    message = choice.message.model_dump(exclude_none=True, exclude={"parsed"})
    for call in message.get("tool_calls", ()):
        call["function"].pop("parsed_arguments", None)
        call.pop("index", None)
    return message, choice.finish_reason


@pytest.mark.parametrize("stream", [False, True])
def test_messages_call_a_tool_and_read_its_result(server: Server, name: str, stream: bool) -> None:
    anthropic = Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300)
    asked: dict[str, Any] = {
        "model": name,
        "max_tokens": 200,
        "extra_body": {"temperature": 0},  # which this client no longer names
        "tools": [{"name": "get_weather", "description": ABOUT, "input_schema": CITY}],
    }

    def ask(messages: list[Any]) -> Any:
        if not stream:
            return anthropic.messages.create(messages=messages, **asked)
        with anthropic.messages.stream(messages=messages, **asked) as events:
            return events.get_final_message()

    messages: list[Any] = [{"role": "user", "content": QUESTION}]
    answer = ask(messages)
    [call] = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "get_weather")
    assert "Paris" in call.input["city"]
    said = [each.model_dump(exclude_none=True) for each in answer.content]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": RESULT}
    turns = [{"role": "assistant", "content": said}, {"role": "user", "content": [result]}]
    answer = ask(messages + turns)
    assert answer.stop_reason == "end_turn"
    assert "31" in answer.content[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_responses_call_a_tool_and_read_its_result(openai: OpenAI, name: str, stream: bool) -> None:
    tool = {"type": "function", "name": "get_weather", "description": ABOUT, "parameters": CITY}
    asked: dict[str, Any] = {
        "model": name,
        "temperature": 0,
        "max_output_tokens": 200,
        "tools": [{**tool, "strict": False}],
    }

    def ask(**more: Any) -> Any:
        if not stream:
            return openai.responses.create(**asked, **more)
        with openai.responses.stream(**asked, **more) as events:
            return events.get_final_response()

    answer = ask(input=QUESTION)
    [call] = answer.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert "Paris" in json.loads(call.arguments)["city"]
    result = {"type": "function_call_output", "call_id": call.call_id, "output": RESULT}
    answer = ask(input=[result], previous_response_id=answer.id)
    assert "31" in answer.output_text


@pytest.mark.parametrize("way", ["suffix", "tokens"])
def test_code_is_filled_in(openai: OpenAI, name: str, way: str) -> None:
    before, after = "def add(a, b):\n    return ", "\n\nprint(add(2, 3))\n"
    if way == "suffix":
        asked = {"prompt": before, "suffix": after}
    else:  # as editors write it
        asked = {"prompt": f"<|fim_prefix|>{before}<|fim_suffix|>{after}<|fim_middle|>"}
    answer = openai.completions.create(model=name, temperature=0, max_tokens=16, **asked)  # type: ignore[call-overload]
    assert answer.choices[0].text.startswith("a + b\n")


def test_an_answer_follows_a_schema(openai: OpenAI, name: str) -> None:
    schema: Any = {"name": "person", "schema": PERSON, "strict": True}
    answer = openai.chat.completions.create(
        model=name,
        temperature=0,
        max_tokens=100,
        messages=[
            {"role": "system", "content": "Extract the person."},
            {"role": "user", "content": "Ada Lovelace was born in 1815 in London."},
        ],
        response_format={"type": "json_schema", "json_schema": schema},
    )
    text = answer.choices[0].message.content or ""
    found = json.loads(text)
    jsonschema.validate(found, PERSON)
    assert found == {"name": "Ada Lovelace", "born": 1815}
    assert text == json.dumps(found, separators=(",", ":"))


@torch.no_grad()
def test_embeddings_are_those_of_transformers(server: Server, qwen: Path, name: str) -> None:
    texts = ["The harbour lay still.", "def add(a, b): return a + b", "Zwölf Boxkämpfer"]
    body = {"model": name, "input": texts}
    data = httpx.post(f"{server.url}/v1/embeddings", json=body, timeout=300).json()["data"]
    ours = torch.tensor([each["embedding"] for each in data])
    tokenizer, model = AutoTokenizer.from_pretrained(qwen), AutoModel.from_pretrained(qwen)
    for text, found in zip(texts, ours, strict=True):
        ids = tokenizer(text, return_tensors="pt").input_ids
        expected = model(ids).last_hidden_state[0, -1].float()
        # The checkpoint is in bfloat16: 8 bits in each of some hundred sums.
        assert torch.cosine_similarity(found, expected, dim=0) > 0.999
