"""Calls without their family's marks: an answer that is nothing but JSON which names a tool."""

import json
import random

import pytest

from localllm.text.tool_calls import HERMES, LLAMA, Tool, ToolCallSplitter, ToolFormat

TOOLS = [Tool("get_weather", {}), Tool("get_traffic", {})]
PARIS = {"city": 'the "Paris" of {'}
ONE = json.dumps({"name": "get_weather", "arguments": PARIS})
TWO = '{"name": "get_traffic", "arguments": {}}'
WEATHER, TRAFFIC = ("get_weather", PARIS), ("get_traffic", {})
Calls = list[tuple[str, dict[str, object]]]


def read(
    text: str, seed: int, form: ToolFormat = HERMES, *, is_cut: bool = False
) -> tuple[str, Calls, str]:
    """The text and the calls of an answer that comes in pieces, and the text before its end."""
    splitter, random_ = ToolCallSplitter(form.for_tools(TOOLS)), random.Random(seed)
    said, calls, at = "", [], 0
    while at < len(text):
        piece = text[at : at + random_.randint(1, 7)]
        more, found = splitter.push(piece)
        said, calls, at = said + more, calls + found, at + len(piece)
    rest, found = splitter.flush(is_cut=is_cut)
    return said + rest, [(c.name, json.loads(c.arguments)) for c in [*calls, *found]], said


CALLS: dict[str, tuple[str, str, Calls]] = {
    "bare": (ONE, "", [WEATHER]),
    "in a block": (f"```json\n{ONE}\n```", "", [WEATHER]),
    "in a block without a language": (f"\n```\n{ONE}\n```\n", "\n", [WEATHER]),
    "in a block that does not end": (f"```json\n{ONE}", "", [WEATHER]),
    "a list": (f"[{ONE}, {TWO}]", "", [WEATHER, TRAFFIC]),
    "a list in a block": (f"```json\n[\n  {ONE},\n  {TWO}\n]\n```", "", [WEATHER, TRAFFIC]),
    "one in each line": (f"{ONE}\n{TWO}", "", [WEATHER, TRAFFIC]),
    "two blocks": (f"```json\n{ONE}\n```\n\n```json\n{TWO}\n```", "", [WEATHER, TRAFFIC]),
    "behind text": (f"Let me look:\n\n```json\n{ONE}\n```", "Let me look:\n\n", [WEATHER]),
    "behind other code": (f"```py\nf()\n```\n```json\n{ONE}\n```", "```py\nf()\n```\n", [WEATHER]),
    "in tags": (f"<tools>\n{ONE}\n</tools>", "", [WEATHER]),
    "with half the marks": (f"{ONE}\n</tool_call>", "", [WEATHER]),
    "parameters": (
        '{"name": "get_traffic", "parameters": {"a": 1}}',
        "",
        [("get_traffic", {"a": 1})],
    ),
    "arguments as a string": (
        '{"name": "get_traffic", "arguments": "{\\"a\\": 1}"}',
        "",
        [("get_traffic", {"a": 1})],
    ),
    "no arguments": ('{"name": "get_traffic", "arguments": null}', "", [TRAFFIC]),
    "arguments first": (
        '{"arguments": {"name": 1}, "name": "get_traffic"}',
        "",
        [("get_traffic", {"name": 1})],
    ),
    "as OpenAI has them": (
        '{"id": "1", "type": "function", "function": {"name": "get_traffic", "arguments": "{}"}}',
        "",
        [TRAFFIC],
    ),
    "the function by name": ('{"function": "get_traffic", "arguments": {}}', "", [TRAFFIC]),
    "in marks, arguments as a string": (
        '<tool_call>\n{"name": "get_traffic", "arguments": "{}"}\n</tool_call>',
        "",
        [TRAFFIC],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_read_and_their_json_is_not_said(name: str) -> None:
    text, said, calls = CALLS[name]
    for seed in range(5):
        assert read(text, seed) == (said, calls, said)


TEXTS = {
    "another name": ('{"name": "get_rain", "arguments": {}}', 20),
    "a key that calls do not have": ('{"name": "get_traffic", "why": 1, "arguments": {}}', 32),
    "other JSON": ('{"a": {"name": "get_traffic", "arguments": {}}}', 10),
    "a list of numbers": ("[1, 2, 3] and so on", 10),
    "a link": ("[link](there) and so on", 10),
    "code": ("```python\nprint('hello')\n```", 12),
    "behind text, without a block": (f"It is {ONE}", 12),
    "behind a line, without a block": (f"It is\n{ONE}", 12),
    "a definition": (
        '{"name": "get_traffic", "parameters": {"type": "object", "properties": {}}}',
        None,
    ),
    "no arguments at all": ('{"name": "get_traffic"}', None),
    "a list as arguments": ('{"name": "get_traffic", "arguments": [1]}', None),
    "text behind it": (f"```json\n{TWO}\n```\nThis calls it.", 70),
    "another object behind it": (f'{TWO}\n{{"a": 1}}', 60),
    "half a call": ('{"name": "get_traffic", "arguments": {"a": ', None),
    "words with ticks": ("It is `a` and\n`b`, ``c`` and ```d```.", 20),
}


@pytest.mark.parametrize("name", TEXTS)
def test_other_answers_are_text_as_soon_as_that_is_certain(name: str) -> None:
    """The number: of characters after which the first of them must have been said."""
    text, told_at = TEXTS[name]
    for seed in range(5):
        said, calls, _ = read(text, seed)
        assert (said, calls) == (text, [])
    if told_at is not None:
        splitter = ToolCallSplitter(HERMES.for_tools(TOOLS))
        assert splitter.push(text[:told_at])[0]


def test_families_without_marks_have_them_in_blocks_too() -> None:
    text = '```json\n{"name": "get_traffic", "parameters": {}}\n```'
    for seed in range(5):
        assert read(text, seed, LLAMA) == ("", [TRAFFIC], "")


def test_where_the_answer_is_to_be_json_it_is_text() -> None:
    splitter = ToolCallSplitter(HERMES.for_tools(TOOLS, reads_lone=False))
    assert splitter.push(ONE) == (ONE, [])


def test_half_a_call_in_marks_is_neither_a_call_nor_text() -> None:
    text = f"<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO[:-9]}"
    for seed in range(5):
        said, calls, _ = read(text, seed, is_cut=True)
        assert (said.strip(), calls) == ("", [WEATHER])
        assert read(text, seed)[0].strip() == f"<tool_call>\n{TWO[:-9]}"


def test_reading_takes_as_long_as_the_answer_is() -> None:
    """Not longer: a held answer is not read again with each piece."""
    arguments = {"text": "x" * 400_000}
    text = json.dumps({"name": "get_traffic", "arguments": arguments})
    splitter = ToolCallSplitter(HERMES.for_tools(TOOLS))
    for at in range(0, len(text), 4):
        assert splitter.push(text[at : at + 4]) == ("", [])
    [call] = splitter.flush()[1]
    assert json.loads(call.arguments) == arguments
