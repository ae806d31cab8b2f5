"""`/v1/responses` through OpenAI's own client."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from server.conftest import Server
from server.test_messages import CALL, event
from server.tool_calling import TOOLS

from localllm.answer.completion import TextEvent
from localllm.schedule.request import FinishReason
from localllm.server.choice import Frame
from localllm.server.refusals import Refusal
from localllm.server.responses_schema import ITEMS, ResponseRequest, messages_of
from localllm.server.responses_writer import ResponsesWriter
from localllm.text.tool_calls import HERMES

QUESTION = "What is the KV cache?"
OWN_TOOLS: Any = [{"type": "function", **each["function"]} for each in TOOLS]
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def ask(client: OpenAI, is_streamed: bool, **arguments: Any) -> Response:
    known: Any = {"model": "pocket", "input": QUESTION, "temperature": 0, **arguments}
    if not is_streamed:
        return client.responses.create(**known)
    with client.responses.stream(**known) as stream:
        numbers = [each.sequence_number for each in stream]
        assert numbers == list(range(len(numbers)))
        return stream.get_final_response()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_is_that_of_a_chat(client: OpenAI, is_streamed: bool) -> None:
    # Their helper for streams knows no end but a whole answer.
    limit = 300 if is_streamed else 30
    said = ask(client, is_streamed, instructions="Be short.", max_output_tokens=limit)
    chat = client.chat.completions.create(
        model="pocket",
        max_tokens=limit,
        temperature=0,
        messages=[
            {"role": "system", "content": "Be short."},
            {"role": "user", "content": QUESTION},
        ],
    )
    assert said.output_text == chat.choices[0].message.content
    assert said.usage is not None
    assert chat.usage is not None
    assert said.usage.input_tokens == chat.usage.prompt_tokens
    is_cut = chat.choices[0].finish_reason == "length"
    assert said.status == ("incomplete" if is_cut else "completed")


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_conversation_goes_on_from_a_response(client: OpenAI, is_streamed: bool) -> None:
    first = ask(client, is_streamed)
    second = ask(client, is_streamed, input="And why?", previous_response_id=first.id)
    by_hand = [
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And why?"},
    ]
    assert second.output_text == ask(client, False, input=by_hand).output_text
    count = client.responses.input_tokens.count(
        model="pocket", input="And why?", previous_response_id=first.id
    )
    assert second.usage is not None
    assert count.input_tokens == second.usage.input_tokens
    kept = client.responses.retrieve(second.id)
    assert (kept.output_text, kept.previous_response_id) == (second.output_text, first.id)
    [item] = client.responses.input_items.list(second.id).data
    assert item.content[0].text == "And why?"  # type: ignore[union-attr]
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError, match="too long ago"):
        ask(client, False, previous_response_id=second.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(first.id)


def test_a_conversation_that_lost_its_beginning_says_so(client: OpenAI) -> None:
    asked = {"model": "pocket", "max_output_tokens": 4}
    first = client.responses.create(input="a", **asked)  # type: ignore[call-overload]
    second = client.responses.create(input="b", previous_response_id=first.id, **asked)  # type: ignore[call-overload]
    client.responses.delete(first.id)
    assert client.responses.retrieve(second.id).id == second.id
    with pytest.raises(openai.BadRequestError, match=r"before .* was deleted"):
        client.responses.create(input="c", previous_response_id=second.id, **asked)  # type: ignore[call-overload]


def test_what_should_not_be_stored_is_not(client: OpenAI) -> None:
    said = ask(client, False, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(said.id)


def test_responses_outlive_the_server_and_belong_to_a_key(serve: Callable[..., Server]) -> None:
    flags = ("--api-key", "first", "--api-key", "second")
    server = serve(*flags)
    said = ask(server.client("first"), False)
    server.process.terminate()
    server.process.wait(30)
    again = serve(*flags)
    assert again.client("first").responses.retrieve(said.id).output_text == said.output_text
    for call in (
        lambda: again.client("second").responses.retrieve(said.id),
        lambda: again.client("second").responses.delete(said.id),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    with pytest.raises(openai.BadRequestError):
        ask(again.client("second"), False, previous_response_id=said.id)


def test_nothing_is_kept_where_nothing_should_be(serve: Callable[..., Server]) -> None:
    client = serve("--keep-responses", "0").client()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(ask(client, False).id)


def test_a_schema_is_kept_to(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}},
        "required": ["ok"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "a", "schema": schema}}
    jsonschema.validate(json.loads(ask(client, False, text=form).output_text), schema)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"input": [{"type": "item_reference", "id": "a"}]}, "function_call_output"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "only text"),
        ({"input": [{"role": "robot", "content": "a"}]}, "role"),
        ({"input": ["a"]}, "function_call_output"),
        ({"tools": ["a"]}, "tools"),
        ({"background": True}, "background"),
        ({"conversation": "conv_1"}, "previous_response_id"),
        ({"truncation": "auto"}, "truncation"),
        ({"tool_choice": "required"}, "tool_choice needs tools"),
        ({"previous_response_id": "resp_1"}, "too long ago"),
    ],
)
def test_what_is_not_supported_is_refused(
    client: OpenAI, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=word):
        ask(client, False, **changes)


def test_tools_that_others_would_run_are_named_in_a_warning(client: OpenAI) -> None:
    found = client.responses.with_raw_response.create(
        model="pocket", input="a", max_output_tokens=1, tools=[{"type": "web_search"}]
    )
    assert found.headers["warning"] == '299 - "ignored: tools.web_search"'


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_are_called_and_told_what_they_found(tool_server: Server, is_streamed: bool) -> None:
    client = tool_server.client()
    for choice in ("required", {"type": "function", "name": "get_traffic"}):
        said = ask(
            client, is_streamed, tools=OWN_TOOLS, tool_choice=choice, parallel_tool_calls=False
        )
        [call] = said.output
        assert call.type == "function_call"
        jsonschema.validate(json.loads(call.arguments), OWN_TOOLS[0]["parameters"])
        found = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        again = ask(
            client, is_streamed, input=[found], previous_response_id=said.id, tools=OWN_TOOLS
        )
        assert said.usage is not None
        assert again.usage is not None
        cached = again.usage.input_tokens_details.cached_tokens
        assert cached > 0.8 * said.usage.input_tokens


def written(events: Sequence[TextEvent]) -> tuple[dict[str, Any], list[Frame], dict[str, Any]]:
    """What a writer makes of events: whole; in frames, each checked; and what it keeps."""
    body = ResponseRequest(input="a")
    kept: list[dict[str, Any]] = []
    whole = ResponsesWriter(body, "m", HERMES, lambda response: None)
    streamed = ResponsesWriter(body, "m", HERMES, kept.append)
    frames: list[Frame] = []
    for each in events:
        whole.add(0, each)
        streamed.add(0, each)
        frames += [] if frames else streamed.begin()
        frames += streamed.frames(0, each)
    frames += streamed.end()
    for place, frame in enumerate(frames):
        assert isinstance(frame.data, dict)
        assert (frame.name, place) == (frame.data["type"], frame.data["sequence_number"])
        EVENTS.validate_python(frame.data)
    [last] = kept
    return whole.whole(), frames, last


def test_thoughts_text_and_calls_are_items_in_order() -> None:
    answer, frames, kept = written(
        [event(thinking="I "), event(thinking="see."), event("Let me"), event(" look.\n"),
         event(CALL), event(end=FinishReason.STOP)]
    )  # fmt: skip
    Response.model_validate(answer)
    thoughts, text, call = answer["output"]
    assert thoughts["content"] == [{"type": "reasoning_text", "text": "I see."}]
    assert text["content"][0]["text"] == "Let me look."
    assert (call["name"], json.loads(call["arguments"])) == ("f", {"a": 1})
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    # The items as they were told one by one are those of the whole.
    done = [f.data["item"] for f in frames if f.name == "response.output_item.done"]  # type: ignore[index]
    assert done == kept["output"]
    without_ids = [{k: v for k, v in each.items() if "id" not in k} for each in done]
    assert without_ids == [
        {k: v for k, v in each.items() if "id" not in k} for each in answer["output"]
    ]
    # And they go back as one message.
    [message] = messages_of(ITEMS.validate_python(kept["output"]))
    assert (message["reasoning_content"], message["content"]) == ("I see.", "Let me look.")
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": {"a": 1}}


def test_an_answer_that_is_cut_is_incomplete() -> None:
    answer, frames, _ = written([event("It "), event("is", end=FinishReason.LENGTH)])
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["output"][0]["status"] == "incomplete"
    assert frames[-1].name == "response.incomplete"


def test_an_error_ends_the_events() -> None:
    writer = ResponsesWriter(ResponseRequest(input="a"), "m", None, lambda r: None)
    [frame] = writer.failed(Refusal(503, "gone"))
    EVENTS.validate_python(frame.data)
    assert frame.name == "response.failed"
