"""What clients send, against the templates of published models: nothing is refused, and all that
was said is in the prompt once, in order.
"""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from server.prompts_of import SPECIAL_TOKENS, TEMPLATES, PromptServer

from localllm.errors import TemplateError
from localllm.text.prompt import ChatMessage, Conversation
from localllm.text.template import render_chat_template

MARK = re.compile(r"[A-Z]\d+z")
# Recorded on 27 November 2026 from Codex 0.171, Claude Code 2.1.197 and OpenCode 1.18.33, which ran
# two turns with calls. Texts are replaced by marks, and descriptions by a few words.
RECORDED = sorted((Path(__file__).parent / "recorded").glob("*.json"))
CHAT = "/v1/chat/completions"
NO_CALLS = "has no known call format"

pytestmark = pytest.mark.skipif(
    not TEMPLATES, reason="the templates of published models lie outside the tree"
)


# One at a time: compiling a template takes longer than everything that is rendered with it.
@pytest.fixture(scope="module", params=TEMPLATES, ids=lambda path: path.stem)
def template(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


@pytest.fixture(scope="module")
def served(template: Path) -> PromptServer:
    return PromptServer(template.read_text(encoding="utf-8"))


def named(stem: str) -> PromptServer:
    [path] = [path for path in TEMPLATES if path.stem.startswith(stem)]
    return PromptServer(path.read_text(encoding="utf-8"))


def system(text: str) -> ChatMessage:
    return {"role": "system", "content": text}


def developer(text: str) -> ChatMessage:
    return {"role": "developer", "content": text}


def user(text: str) -> ChatMessage:
    return {"role": "user", "content": text}


def assistant(text: Any, **more: Any) -> ChatMessage:
    return {"role": "assistant", "content": text, **more}


def call(arguments: Any, name: str = "clock", id: str = "call_1") -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(text: Any, id: str | None = "call_1") -> ChatMessage:
    named = {} if id is None else {"tool_call_id": id}
    return {"role": "tool", "content": text, **named}


def tool(parameters: Any = None, **more: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": "clock", **more, **given}}


CLOCK = tool({"type": "object", "properties": {"zone": {"type": "string"}}}, description="Time.")
ZONE = '{"zone": "C1z"}'
# Conversations whose texts carry marks: S, U, A, C and R, for system, user, assistant, calls and
# results. Their order in the prompt is that of the numbers in `ORDERS`, or else the one here.
CONVERSATIONS: dict[str, list[ChatMessage]] = {
    "plain": [system("S1z"), user("U1z"), assistant("A1z"), user("U2z")],
    "two system messages": [system("S1z"), system("S2z"), user("U1z")],
    "system, developer": [system("S1z"), developer("S2z"), user("U1z")],
    "developer": [developer("S1z"), user("U1z"), assistant("A1z"), user("U2z")],
    "three leading": [system("S1z"), developer("S2z"), system("S3z"), user("U1z")],
    "late system": [system("S1z"), user("U1z"), assistant("A1z"), system("S2z"), user("U2z")],
    "system at the end": [user("U1z"), assistant("A1z"), user("U2z"), system("S1z")],
    "system between": [user("U1z"), system("S1z"), assistant("A1z"), user("U2z")],
    "system only": [system("S1z")],
    "systems only": [system("S1z"), developer("S2z")],
    "no user": [system("S1z"), assistant("A1z")],
    "assistant first": [assistant("A1z"), user("U1z")],
    "system, assistant first": [system("S1z"), assistant("A1z"), user("U1z")],
    "users": [user("U1z"), user("U2z")],
    "users later": [user("U1z"), assistant("A1z"), user("U2z"), user("U3z"), user("U4z")],
    "assistants": [user("U1z"), assistant("A1z"), assistant("A2z"), user("U2z")],
    "assistant last": [user("U1z"), assistant("A1z")],
    "silent assistant": [user("U1z"), assistant(None), user("U2z")],
    "no parts": [user("U1z"), assistant([]), user("U2z")],
    "parts": [
        {"role": "user", "content": [{"type": "input_text", "text": "U1z"}, {"text": "U2z"}]},
        assistant([{"type": "output_text", "text": "A1z"}, {"type": "refusal", "refusal": "A2z"}]),
        user("U3z"),
    ],
    "call": [
        system("S1z"), user("U1z"), assistant("", tool_calls=[call(ZONE)]), result("R1z"),
    ],
    "call and answer": [
        user("U1z"), assistant(None, tool_calls=[call(ZONE)]), result("R1z"), assistant("A1z"),
        user("U2z"),
    ],
    "text and call": [
        user("U1z"), assistant("A1z", tool_calls=[call({"zone": "C1z"})]), result("R1z"),
        assistant("A2z"), user("U2z"),
    ],
    "text, then call": [
        user("U1z"), assistant("A1z"), assistant(None, tool_calls=[call(ZONE)]), result("R1z"),
        assistant("A2z"), user("U2z"),
    ],
    "user behind a result": [
        user("U1z"), assistant("", tool_calls=[call(ZONE)]), result("R1z"), user("U2z"),
    ],
    "call without a result": [user("U1z"), assistant("", tool_calls=[call(ZONE)]), user("U2z")],
    "several calls": [
        user("U1z"),
        assistant("", tool_calls=[call(ZONE, id="x"), call('{"zone": "C2z"}', id="y")]),
        result("R1z", "x"), result("R2z", "y"), assistant("A1z"), user("U2z"),
    ],
    "results in another order": [
        user("U1z"),
        assistant("", tool_calls=[call(ZONE, id="x"), call('{"zone": "C2z"}', id="y")]),
        result("R2z", "y"), result("R1z", "x"),
    ],
    "results without names": [
        user("U1z"),
        assistant("", tool_calls=[call(ZONE, id="x"), call('{"zone": "C2z"}', id="y")]),
        result("R1z", None), result("R2z", None),
    ],
    "a text before its result": [
        user("U1z"), assistant("", tool_calls=[call(ZONE)]), user("U2z"), result("R1z"),
    ],
    "a system message before the result": [
        user("U1z"), assistant("", tool_calls=[call(ZONE)]), system("S1z"), result("R1z"),
    ],
    "results of nothing": [user("U1z"), result("R1z"), assistant("A1z"), result("R2z", "no"),
                           user("U2z")],
    "the same name twice": [
        user("U1z"), assistant("", tool_calls=[call(ZONE)]), result("R1z"),
        assistant("", tool_calls=[call('{"zone": "C2z"}')]), result("R2z"),
    ],
    "empty arguments": [
        user("U1z"), assistant("", tool_calls=[call("")]), result("R1z"),
        assistant("", tool_calls=[call("null")]), result("R2z"),
        assistant("", tool_calls=[call(None)]), result("R3z"),
        assistant("", tool_calls=[call(" ")]), result("R4z"),
    ],
    "odd arguments": [
        user("U1z"), assistant("", tool_calls=[call('{"zone": "C1z')]), result("R1z"),
        assistant("", tool_calls=[call('["C2z"]')]), result("R2z"),
        assistant("", tool_calls=[call(json.dumps('{"zone": "C3z"}'))]), result("R3z"),
    ],
    "thoughts": [
        user("U1z"), assistant("A1z", reasoning="T"), user("U2z"),
        assistant("", reasoning="T", tool_calls=[call(ZONE)]), result("R1z"),
        assistant("A2z", reasoning_content="T", tool_calls=[call('{"zone": "C2z"}')]),
        result("R2z"),
    ],
}  # fmt: skip
# Where a template may show a text behind the calls beside it, as Gemma 4 does.
LOOSE = frozenset({"text and call", "thoughts"})
MOVED = {
    "results in another order": {"U1z C1z C2z R1z R2z", "U1z C1z R1z C2z R2z",
                                 "U1z C1z C2z R2z R1z"},
    "a text before its result": {"U1z C1z R1z U2z"},
    "a system message before the result": {"U1z C1z R1z S1z"},
    "several calls": {"U1z C1z C2z R1z R2z A1z U2z", "U1z C1z R1z C2z R2z A1z U2z"},
    "results without names": {"U1z C1z C2z R1z R2z", "U1z C1z R1z C2z R2z"},
}  # fmt: skip


def marks_of(messages: Sequence[ChatMessage]) -> list[str]:
    """In order; calls behind the text beside them."""
    found = list[str]()
    for each in messages:
        found += MARK.findall(json.dumps(each["content"]))
        found += MARK.findall(json.dumps(each.get("tool_calls", "")))
    return found


def ways() -> Iterator[tuple[str, list[ChatMessage], list[dict[str, Any]] | None]]:
    """Every conversation, with tools if it has calls; some that have none, with tools too."""
    for name, messages in CONVERSATIONS.items():
        has_calls = any("tool_calls" in each for each in messages)
        if not has_calls:
            yield name, messages, None
        if has_calls or name in ("plain", "three leading", "systems only", "assistant first"):
            yield name, messages, [CLOCK]


def test_all_that_was_said_is_in_the_prompt_once_and_in_order(served: PromptServer) -> None:
    wrong = []
    for name, messages, tools in ways():
        found = MARK.findall(served.tokenizer.render_chat(Conversation(messages, tools)))
        expected = marks_of(messages)
        if name in LOOSE:
            found, expected = sorted(found), sorted(expected)
        if " ".join(found) not in MOVED.get(name, {" ".join(expected)}):
            wrong.append((name, bool(tools), found))
    assert not wrong


def test_what_a_template_takes_is_rendered_as_it_is(template: Path, served: PromptServer) -> None:
    """Of two templates, one knows no system message, and the other keeps it for the end."""
    source = template.read_text(encoding="utf-8")
    if "tool_use" in template.stem:
        pytest.skip("this template is for tools only")
    has_system = "gemma-2" not in template.stem and "Nemo" not in template.stem
    said = CONVERSATIONS["plain"][0 if has_system else 1 :]
    expected = render_chat_template(source, said, None, True, **SPECIAL_TOKENS)
    assert served.tokenizer.render_chat(Conversation(said)) == expected
    assert served.tokenizer.encode_chat(Conversation(said)).changes == ()


def test_a_template_that_takes_everything_gets_everything_unchanged() -> None:
    tokenizer = named("Qwen-Qwen2.5").tokenizer
    changed = {
        name: tokenizer.encode_chat(Conversation(messages, tools)).changes
        for name, messages, tools in ways()
    }
    moved = ("results of tools stand behind their calls",)
    assert {name: told for name, told in changed.items() if told} == {
        "results in another order": moved,
        "a text before its result": moved,
        "a system message before the result": moved,
    }


@pytest.mark.parametrize(
    ("stem", "name", "prompt"),
    [
        ("Qwen3.5", "three leading", "<|im_start|>system\nS1z\n\nS2z\n\nS3z<|im_end|>\n"),
        ("Qwen3.5", "late system", "assistant\nA1z<|im_end|>\n<|im_start|>user\nS2z<|im_end|>\n"),
        ("Mistral-Small", "users later", "[INST]U2z\n\nU3z\n\nU4z[/INST]"),
        ("Mistral-Small", "user behind a result", "R1z[/TOOL_RESULTS]</s>[INST]U2z[/INST]"),
        ("google-gemma-2", "three leading", "user\nS1z\n\nS2z\n\nS3z\n\nU1z<end_of_turn>"),
        ("openai-gpt-oss", "text and call", "<|channel|>final<|message|>A1z<|end|>"),
        ("deepseek", "call", 'json\n{"zone": "C1z"}\n'),
        ("Qwen3-Coder", "odd arguments", '<parameter=arguments>\n["C2z"]\n</parameter>'),
    ],
)
def test_how_a_conversation_is_fitted(stem: str, name: str, prompt: str) -> None:
    assert prompt in named(stem).tokenizer.render_chat(Conversation(CONVERSATIONS[name]))


def with_tool(schema: Any, description: str | None = "Time.") -> dict[str, Any]:
    parameters = {"type": "object", "properties": {"zone": schema}}
    return tool(parameters, description=description)


# Everything that a schema may leave out, or have as null.
TOOLS: dict[str, dict[str, Any]] = {
    "bare": tool(),
    "empty": tool({}),
    "no properties": tool({"type": "object"}, description="Time."),
    "no description": with_tool({"type": "string"}, description=None),
    "nulls": tool(
        {"type": "object", "properties": None, "required": None, "description": None},
        description=None,
        strict=None,
    ),
    "null in a property": with_tool(
        {"type": "string", "description": None, "enum": None, "default": None, "items": None}
    ),
    "null property": with_tool(None),
    "anything": with_tool({}),
    "any of": with_tool({"anyOf": [{"type": "string"}, {"type": "null"}]}),
    "list or null": with_tool(
        {"anyOf": [{"type": "array", "items": {"type": "string"}}, {"type": "null"}]}
    ),
    "several": with_tool({"oneOf": [{"type": "string"}, {"type": "integer"}]}),
    "all of": with_tool({"allOf": [{"type": "string"}, {"minLength": 1}]}),
    "choices": with_tool({"enum": ["a", "b"]}),
    "choices or null": with_tool({"enum": ["a", None]}),
    "numbers": with_tool({"type": "integer", "enum": [1, 2], "default": 1}),
    "constant": with_tool({"const": "a"}),
    "list of types": with_tool({"type": ["string", "null"]}),
    "object": with_tool({"properties": {"inner": {"enum": [1]}}}),
    "array": with_tool({"type": "array", "items": {"anyOf": [{"type": "string"}]}}),
    "bare array": with_tool({"type": "array"}),
    "values": with_tool({"type": "object", "additionalProperties": {}}),
    "reference": tool(
        {
            "type": "object",
            "properties": {"zone": {"$ref": "#/$defs/Zone"}, "more": {"$ref": "#/$defs/Tree"}},
            "$defs": {
                "Zone": {"enum": ["a", "b"], "description": "Where."},
                "Tree": {"type": "object", "properties": {"child": {"$ref": "#/$defs/Tree"}}},
            },
        },
        description="Time.",
    ),
    "closed object": with_tool({"type": "object", "additionalProperties": False}),
    "nothing in a list": with_tool({"type": "array", "items": {}}),
    "draft 3": with_tool({"type": "string", "required": True}),
}


def test_no_tool_is_refused(served: PromptServer) -> None:
    """By the template, or by what holds its arguments."""
    tools = [
        {"type": "function", "function": {**each["function"], "name": f"clock{place}"}}
        for place, each in enumerate(TOOLS.values())
    ]
    body = {"messages": [user("U1z")], "tools": tools}
    response = served.post(CHAT, body)
    if NO_CALLS in response.text:
        prompt = served.tokenizer.render_chat(Conversation(body["messages"], tools))
    else:
        assert response.status_code == 200, response.text
        prompt = served.prompt
    assert "U1z" in prompt
    assert prompt.count("clock23") > 0 or "clock" not in prompt


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("any of", 'zone:{nullable:true,type:<|"|>STRING<|"|>}'),
        ("list or null", 'items:{type:<|"|>STRING<|"|>},nullable:true,type:<|"|>ARRAY<|"|>}'),
        ("choices", 'enum:[<|"|>a<|"|>,<|"|>b<|"|>],type:<|"|>STRING<|"|>}'),
        ("list of types", 'zone:{nullable:true,type:<|"|>STRING<|"|>}'),
        ("object", 'type:<|"|>OBJECT<|"|>}'),
        ("reference", 'zone:{description:<|"|>Where.<|"|>'),
    ],
)
def test_types_are_read_off(name: str, written: str) -> None:
    """For Gemma 4, whose template shows the types alone."""
    prompt = named("google-gemma-4").tokenizer.render_chat(
        Conversation([user("U1z")], [TOOLS[name]])
    )
    assert written in prompt.replace("{ ", "{")


def test_a_template_that_needs_types_gets_them() -> None:
    """Other versions of Gemma 4's template take the first type of a list, and refuse none."""
    [path] = [path for path in TEMPLATES if path.stem.startswith("google-gemma-4")]
    own = path.read_text(encoding="utf-8")
    first = "(value['type'] if value['type'] is string else value['type'][0])"
    served = PromptServer(own.replace("value['type'] |", f"{first} |"))
    with pytest.raises(TemplateError):
        render_chat_template(
            own.replace("value['type'] |", f"{first} |"), [user("")], [TOOLS["anything"]]
        )
    for name, each in TOOLS.items():
        response = served.post(CHAT, {"messages": [user("U1z")], "tools": [each]})
        assert response.status_code == 200, (name, response.text)
        assert "U1z" in served.prompt


def requests_of(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each request's path and body."""
    recorded = json.loads(path.read_text())
    for each in recorded["requests"]:
        tools = {"tools": recorded["tools"]} if "tools" in each["body"] else {}
        yield each["path"], {**each["body"], **tools}


def test_every_request_of_an_agent_is_answered(template: Path, served: PromptServer) -> None:
    # Gemma 4's has texts behind calls.
    check_requests(served, is_sorted=template.stem.startswith("google-gemma-4"))


@pytest.mark.parametrize(
    "kept",
    [
        "(preserve_thinking is defined and preserve_thinking is true) or",  # Qwen3.6
        "(preserve_thinking is undefined or preserve_thinking is true) or",  # Qwen3.8
    ],
)
def test_newer_templates_of_qwen_answer_them_too(kept: str) -> None:
    """They are Qwen3.5's, but keep the thoughts of earlier answers."""
    [path] = [path for path in TEMPLATES if path.stem.startswith("Qwen3.5")]
    own, condition = path.read_text(encoding="utf-8"), "{%- if loop.index0 > ns.last_query_index"
    assert own.count(condition) == 1
    check_requests(PromptServer(own.replace(condition, condition.replace("if", f"if {kept}"))))


def check_requests(served: PromptServer, *, is_sorted: bool = False) -> None:
    """Every recorded request is answered, from a prompt that holds all it said."""
    for program in RECORDED:
        for path, body in requests_of(program):
            response = served.post(path, body)
            if NO_CALLS in response.text:
                body = {**body, "tools": []}
                response = served.post(path, body)
            assert response.status_code == 200, (program.stem, response.text)
            assert "Fine." in response.text
            told = sorted(set(MARK.findall(json.dumps(body))), key=lambda mark: int(mark[1:-1]))
            found = MARK.findall(served.prompt)
            if is_sorted:
                found.sort(key=lambda mark: int(mark[1:-1]))
            assert found == told, (program.stem, path)


def test_the_programs_are_all_there() -> None:
    assert [path.stem for path in RECORDED] == ["claude-code", "codex", "opencode"]
    assert sum(len(list(requests_of(path))) for path in RECORDED) == 7
