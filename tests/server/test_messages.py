"""`/v1/messages` through Anthropic's own client."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import anthropic
import jsonschema
import pytest
from anthropic import Anthropic
from anthropic.types import Message, RawMessageStreamEvent
from pydantic import TypeAdapter
from server.conftest import Server
from server.tool_calling import TOOLS

from localllm.answer.completion import TextEvent, TokenInfo
from localllm.schedule.request import FinishReason
from localllm.server.choice import Frame
from localllm.server.messages_writer import MessagesWriter
from localllm.server.refusals import Refusal
from localllm.text.tool_calls import HERMES

QUESTION: Any = [{"role": "user", "content": "What is the KV cache?"}]
OWN_TOOLS: Any = [
    {"name": each["function"]["name"], "input_schema": each["function"]["parameters"]}
    for each in TOOLS
]
EVENTS: TypeAdapter[Any] = TypeAdapter(RawMessageStreamEvent)


def client_of(server: Server, **settings: Any) -> Anthropic:
    return Anthropic(base_url=server.url, max_retries=0, **({"api_key": "none"} | settings))


@pytest.fixture
def messages(server: Server) -> Anthropic:
    return client_of(server)


def ask(client: Anthropic, is_streamed: bool, **arguments: Any) -> Message:
    known: Any = {"model": "pocket", "max_tokens": 40, "messages": QUESTION, **arguments}
    if not is_streamed:
        return client.messages.create(**known)
    with client.messages.stream(**known) as stream:
        for _ in stream:
            pass
        return stream.get_final_message()


@pytest.mark.parametrize("is_streamed", [False, True])
def test_an_answer_is_that_of_a_chat(
    server: Server, messages: Anthropic, is_streamed: bool
) -> None:
    system = [
        {"type": "text", "text": "Be short."},
        {"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}},
    ]
    extra = {"extra_body": {"temperature": 0}}
    said = ask(messages, is_streamed, system=system, **extra)
    [block] = said.content
    chat = server.client().chat.completions.create(
        model="pocket",
        max_tokens=40,
        temperature=0,
        messages=[{"role": "system", "content": "Be short.\nBe kind."}, *QUESTION],
    )
    assert block.type == "text"
    assert block.text == chat.choices[0].message.content
    assert said.stop_reason == ("max_tokens" if said.usage.output_tokens == 40 else "end_turn")
    count = messages.messages.count_tokens(model="pocket", system=system, messages=QUESTION)
    usage = said.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == count.input_tokens


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_sequence_is_named(messages: Anthropic, is_streamed: bool) -> None:
    said = ask(messages, is_streamed, stop_sequences=[" keys"], extra_body={"temperature": 0})
    assert (said.stop_reason, said.stop_sequence) == ("stop_sequence", " keys")


def test_an_answer_that_the_client_began_goes_on(messages: Anthropic) -> None:
    greedy = {"extra_body": {"temperature": 0}}
    [whole] = ask(messages, False, **greedy).content
    first = whole.text[: whole.text.index(" keys")]
    begun = [*QUESTION, {"role": "assistant", "content": first}]
    [rest] = ask(messages, False, messages=begun, max_tokens=10, **greedy).content
    assert rest.text
    assert whole.text.startswith(first + rest.text)


def test_no_tokens_only_fill_the_cache(messages: Anthropic) -> None:
    new = [{"role": "user", "content": "Nobody has asked this long question before. " * 4}]
    read = ask(messages, False, messages=new, max_tokens=0)
    assert (read.content, read.usage.output_tokens, read.stop_reason) == ([], 0, "max_tokens")
    again = ask(messages, False, messages=new)
    assert (again.usage.cache_read_input_tokens or 0) > 0.6 * read.usage.input_tokens


def test_a_schema_is_kept_to(messages: Anthropic) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"format": {"type": "json_schema", "schema": {**schema, "additionalProperties": False}}}
    [block] = ask(messages, False, output_config=form, max_tokens=60).content
    jsonschema.validate(json.loads(block.text), schema)


def of_user(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(blocks)}]}


@pytest.mark.parametrize(
    ("changes", "status", "word"),
    [
        ({"model": "claude"}, 404, "claude"),
        ({"messages": []}, 400, "messages"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        (of_user({"type": "text", "text": "a " * 3000}), 400, "prompt is too long: "),
        ({"tools": [{"type": "web_search_20250305", "name": "a"}]}, 400, "web_search"),
        ({"mcp_servers": [{"url": "x"}]}, 400, "mcp_servers"),
        (of_user({"type": "image", "source": {}}), 400, "only text"),
        (of_user({"type": "tool_use", "id": "a", "name": "b", "input": {}}), 400, "tool_use"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_their_words(
    messages: Anthropic, changes: dict[str, Any], status: int, word: str
) -> None:
    known = {"model": "pocket", "max_tokens": 5, "messages": QUESTION, **changes}
    with pytest.raises(anthropic.APIStatusError) as caught:
        messages.post("/v1/messages", body=known, cast_to=object)
    assert caught.value.status_code == status
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["type"] == "error"
    kind = "not_found_error" if status == 404 else "invalid_request_error"
    assert caught.value.body["error"]["type"] == kind
    assert word in caught.value.body["error"]["message"]


def test_keys_are_taken_where_their_client_puts_them(serve: Callable[..., Server]) -> None:
    server = serve("--api-key", "secret")
    assert ask(client_of(server, api_key="secret"), False, max_tokens=1).content
    assert ask(client_of(server, api_key=None, auth_token="secret"), False, max_tokens=1).content
    with pytest.raises(anthropic.AuthenticationError) as caught:
        ask(client_of(server, api_key="wrong"), False)
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["error"]["type"] == "authentication_error"


def test_models_are_listed_as_their_client_reads_them(messages: Anthropic) -> None:
    [model] = messages.models.list().data
    assert (model.id, model.type, model.max_input_tokens) == ("pocket", "model", 2048)
    assert messages.models.retrieve("pocket").id == "pocket"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_tools_are_called_and_told_what_they_found(tool_server: Server, is_streamed: bool) -> None:
    client = client_of(tool_server)
    asked: dict[str, Any] = {"tools": OWN_TOOLS, "max_tokens": 200}
    for choice in ({"type": "any"}, {"type": "tool", "name": "get_traffic"}):
        choice["disable_parallel_tool_use"] = True
        said = ask(client, is_streamed, tool_choice=choice, **asked)
        assert said.stop_reason == "tool_use"
        [block] = said.content
        assert block.type == "tool_use"
        assert choice["type"] == "any" or block.name == "get_traffic"
        jsonschema.validate(block.input, OWN_TOOLS[0]["input_schema"])
        result = {"type": "tool_result", "tool_use_id": block.id, "content": "sunny"}
        history = [
            *QUESTION,
            {"role": "assistant", "content": said.content},
            {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
        ]
        again = ask(client, is_streamed, messages=history, tools=OWN_TOOLS)
        cached, new = again.usage.cache_read_input_tokens or 0, again.usage.input_tokens
        # All up to the end of the call, whose spelling the template knows.
        assert cached > 0.8 * (said.usage.input_tokens + (said.usage.cache_read_input_tokens or 0))
        assert new > 0


def event(text: str = "", thinking: str = "", end: FinishReason | None = None) -> TextEvent:
    token = TokenInfo(1, None, False)
    return TextEvent(0, text, thinking, token, end, None, 0, 0, 0.0)


CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def written(events: Sequence[TextEvent], tools: Any = HERMES) -> tuple[dict[str, Any], list[Frame]]:
    """What a writer makes of events: whole, and in frames, each checked against its type."""
    whole = MessagesWriter("m", tools)
    streamed = MessagesWriter("m", tools)
    frames: list[Frame] = []
    for each in events:
        whole.add(0, each)
        streamed.add(0, each)
        frames += [] if frames else streamed.begin()
        frames += streamed.frames(0, each)
    frames += streamed.end()
    for frame in frames:
        assert isinstance(frame.data, dict)
        assert frame.name == frame.data["type"]
        if frame.name != "ping":
            EVENTS.validate_python(frame.data)
    return whole.whole(), frames


def test_thoughts_text_and_calls_are_blocks_in_order() -> None:
    answer, frames = written(
        [event(thinking="I "), event(thinking="see."), event("Let me"), event(" look.\n"),
         event(CALL), event(end=FinishReason.STOP)]
    )  # fmt: skip
    Message.model_validate(answer)
    thoughts, text, call = answer["content"]
    assert (thoughts["thinking"], text["text"]) == ("I see.", "Let me look.")
    assert (call["name"], call["input"]) == ("f", {"a": 1})
    assert (answer["stop_reason"], answer["usage"]["output_tokens"]) == ("tool_use", 6)
    assert answer["usage"]["output_tokens_details"]["thinking_tokens"] == 2
    begun = [f.data["index"] for f in frames if f.name == "content_block_start"]  # type: ignore[index]
    ended = [f.data["index"] for f in frames if f.name == "content_block_stop"]  # type: ignore[index]
    assert begun == ended == [0, 1, 2]
    told = [f.data["delta"] for f in frames if f.name == "content_block_delta"]  # type: ignore[index]
    assert "".join(each.get("text", "") for each in told) == "Let me look."
    assert json.loads("".join(each.get("partial_json", "") for each in told)) == {"a": 1}


def test_space_is_kept_but_before_a_call() -> None:
    answer, _ = written([event("So \n"), event("\n it is. \n", end=FinishReason.STOP)])
    assert [each["text"] for each in answer["content"]] == ["So \n\n it is. \n"]


def test_an_error_ends_the_events_in_their_words() -> None:
    writer = MessagesWriter("m", None)
    [frame] = writer.failed(Refusal(503, "gone"))
    told = {"type": "overloaded_error", "message": "gone"}
    assert frame == Frame({"type": "error", "error": told}, "error")
