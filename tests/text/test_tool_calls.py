"""Calls of tools in the ways of three families: forced to their schemas, and read back."""

import json
import time
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from tokenizers import AddedToken

from localllm.answer.grammar_compiler import GrammarCompiler
from localllm.hub.checkpoint import open_checkpoint
from localllm.text.grammar import Grammar
from localllm.text.prompt import Conversation, Prompt
from localllm.text.thinking import FAMILIES, ThinkingSplitter
from localllm.text.tokenizer import Tokenizer
from localllm.text.tool_calls import (
    COMMAND,
    GEMMA4,
    GLM4,
    GLM45,
    GLM47,
    GRANITE,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
    SEED,
    Tool,
    ToolCall,
    ToolCallSplitter,
    ToolFormat,
    find_tool_format,
    tool_grammar,
)

TEMPLATES = Path(__file__).parents[3] / "shared/data/chat_templates"
FORMATS = {
    "hermes": HERMES,
    "mistral": MISTRAL,
    "mistral args": MISTRAL_ARGS,
    "llama": LLAMA,
    "granite": GRANITE,
    "command": COMMAND,
    "glm4": GLM4,
    "harmony": HARMONY,
}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
PLACE = {
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    "properties": {"at": {"$ref": "#/$defs/point"}},
    "additionalProperties": False,
}
TOOLS = [Tool("weather", CITY), Tool("weather_map", PLACE)]
PARIS = '{"city": "Paris"}'
WRITTEN = {
    "hermes": f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>',
    "mistral": f'[TOOL_CALLS][{{"name": "weather", "arguments": {PARIS}}}]',
    "mistral args": f"[TOOL_CALLS]weather[ARGS]{PARIS}",
    "llama": f'{{"name": "weather", "parameters": {PARIS}}}',
    "granite": f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}]',
    "command": f'<|START_ACTION|>[\n    {{"tool_call_id": "7", "tool_name": "weather", '
    f'"parameters": {PARIS}}}\n]<|END_ACTION|>',
    "glm4": f"weather\n{PARIS}",
    "harmony": "to=functions.weather<|channel|>commentary <|constrain|>json<|message|>" + PARIS,
}
TWO = {
    "hermes": WRITTEN["hermes"] + "\n" + WRITTEN["hermes"].replace("Paris", "Oslo"),
    "mistral": WRITTEN["mistral"][:-1]
    + f', {{"name": "weather", "arguments": {PARIS}}}]'.replace("Paris", "Oslo"),
    "mistral args": WRITTEN["mistral args"] + WRITTEN["mistral args"].replace("Paris", "Oslo"),
    "granite": WRITTEN["granite"][:-1]
    + f', {{"name": "weather", "arguments": {PARIS}}}]'.replace("Paris", "Oslo"),
    "command": WRITTEN["command"].partition("\n]")[0]
    + f',\n    {{"tool_call_id": "8", "tool_name": "weather", "parameters": {PARIS}}}'.replace(
        "Paris", "Oslo"
    )
    + "\n]<|END_ACTION|>",
}


@pytest.mark.skipif(not TEMPLATES.exists(), reason="the templates lie outside the repository")
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Qwen-Qwen2.5-7B-Instruct", HERMES),
        ("Qwen-Qwen3-0.6B", HERMES),
        ("NousResearch-Hermes-3-Llama-3.1-8B-tool_use", HERMES),
        ("meta-llama-Llama-3.1-8B-Instruct", LLAMA),
        ("meta-llama-Llama-3.2-3B-Instruct", LLAMA),
        ("mistralai-Mistral-Nemo-Instruct-2407", MISTRAL),
        ("unsloth-mistral-Devstral-Small-2507", MISTRAL_ARGS),
        ("Mistral-Small-3.2-24B-Instruct-2506", MISTRAL_ARGS),
        ("google-gemma-2-2b-it", None),
        ("Qwen3-Coder", QWEN_CODER),
        ("Qwen3.5-4B", QWEN_CODER),
        ("ByteDance-Seed-OSS", SEED),
        ("GLM-4.6", GLM45),
        ("google-gemma-4-31B-it", GEMMA4),
        ("ibm-granite-granite-3.3-2B-Instruct", GRANITE),
        ("openai-gpt-oss-120b", HARMONY),
    ],
)
def test_the_template_tells_how_calls_are_written(name: str, expected: ToolFormat | None) -> None:
    assert find_tool_format((TEMPLATES / f"{name}.jinja").read_text()) == expected


def split(form: ToolFormat, pieces: list[str]) -> tuple[str, list[ToolCall]]:
    splitter = ToolCallSplitter(form)
    text, calls = "", list[ToolCall]()
    for piece in pieces:
        said, found = splitter.push(piece)
        text, calls = text + said, calls + found
    said, found = splitter.flush()
    return text + said, calls + found


def cut(text: str, seed: int) -> list[str]:
    random = Random(seed)
    places = sorted({0, len(text), *(random.randrange(len(text) + 1) for _ in range(12))})
    return [text[a:b] for a, b in pairwise(places)]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", sorted(FORMATS))
def test_calls_are_read_from_pieces_of_any_length(name: str, seed: int) -> None:
    text, [call] = split(FORMATS[name], cut(WRITTEN[name], seed))
    assert (text, call.name, json.loads(call.arguments)) == ("", "weather", {"city": "Paris"})
    assert len(call.id) == 9
    if name in TWO:
        text, calls = split(FORMATS[name], cut(TWO[name], seed))
        assert [json.loads(each.arguments)["city"] for each in calls] == ["Paris", "Oslo"]
        assert text.strip() == ""
    if FORMATS[name].opens:
        text, calls = split(FORMATS[name], cut("Let me look.\n" + WRITTEN[name], seed))
        assert (text, len(calls)) == ("Let me look.\n", 1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", sorted(FORMATS))
@pytest.mark.parametrize(
    "text",
    ["Just words.", "a < b and <tool", '{"name": "no call"}', "[TOOL", "{ not json", "", " \n"],
)
def test_what_is_no_call_stays_text(name: str, text: str, seed: int) -> None:
    assert split(FORMATS[name], cut(text, seed)) == (text, [])


def test_a_call_that_cannot_be_read_stays_text() -> None:
    text = 'So: <tool_call>\n{"name": 3}\n</tool_call> and on'
    assert split(HERMES, cut(text, 1)) == (text, [])
    cut_off = '<tool_call>\n{"name": "weather", "argu'
    assert split(HERMES, cut(cut_off, 1)) == (cut_off, [])


@pytest.mark.parametrize("seed", range(4))
def test_arguments_may_hold_the_mark_that_ends_a_call(seed: int) -> None:
    arguments = {"html": "close </tool_call> now", "more": "</tool_call>"}
    call = json.dumps({"name": "f", "arguments": arguments})
    written = f"<tool_call>\n{call}\n</tool_call>"
    text, calls = split(HERMES, cut(f"So: {written}\n{written}", seed))
    assert [json.loads(each.arguments) for each in calls] == [arguments] * 2
    assert text.strip() == "So:"


def test_arguments_are_json_for_everybody() -> None:
    half = WRITTEN["hermes"].replace("Paris", "\\ud800")
    _, [call] = split(HERMES, [half])
    assert call.arguments.encode() == b'{"city": "\\ud800"}'
    _, [call] = split(HERMES, [WRITTEN["hermes"].replace("Paris", "Malmö")])
    assert call.arguments == '{"city": "Malmö"}'
    endless = WRITTEN["hermes"].replace('"Paris"', "1e999")
    assert split(HERMES, [endless]) == (endless, [])


def test_llama_and_mistral_have_a_mark_and_an_id() -> None:
    text, [call] = split(LLAMA, ["<|python", "_tag|>" + WRITTEN["llama"]])
    assert (text, call.name) == ("", "weather")
    text, [call] = split(MISTRAL_ARGS, [f"[TOOL_CALLS]weather[CALL_ID]abcDEF123[ARGS]{PARIS}"])
    assert (text, call.id) == ("", "abcDEF123")


@pytest.fixture(scope="module", params=["text", "special tokens", "tags"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """One for which the marks are text, one for which they are special tokens, one between."""
    backend = open_checkpoint().tokenizer._backend
    marks = [
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<|tool_call|>",
        "<seed:tool_call>",
        "</seed:tool_call>",
    ]
    marks += ["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
    marks += ["<|START_ACTION|>", "<|END_ACTION|>"]
    marks += ["<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>"]
    marks += ["[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>", "<|python_tag|>"]
    if request.param == "special tokens":
        backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    elif request.param == "tags":
        backend.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return Tokenizer(lambda: backend, {}, {})


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, tokenizer.num_token_ids, frozenset({0}))


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_arguments_are_forced_to_their_schema(
    tokenizer: Tokenizer, compiler: GrammarCompiler, name: str
) -> None:
    form, written = FORMATS[name], WRITTEN[name]

    def allows(text: str, grammar: Grammar) -> bool:
        matcher = compiler.compile(grammar, Prompt([1])).matcher
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        # To the end: what may go on is not complete.
        return matcher.count_allowed([*ids, 0]) == len(ids) + 1

    def grammar(way: str, **more: object) -> Grammar:
        return tool_grammar(form, TOOLS, way, tokenizer.as_lark, **more)  # type: ignore[arg-type]

    for way in ("required", "auto"):
        assert allows(written, grammar(way))
        assert allows(written.replace("weather", "weather_map").replace(PARIS, "{}"), grammar(way))
        assert not allows(written.replace('"city"', '"town"'), grammar(way))
        assert not allows(written.replace('"Paris"', "5"), grammar(way))
        if form.before:  # what is no name may be text elsewhere
            assert not allows(written.replace('"weather"', '"rain"'), grammar(way))
        if name in TWO:
            assert allows(TWO[name], grammar(way))
            if way == "required":
                assert not allows(TWO[name], grammar(way, are_parallel=False))
    assert not allows("Just words.", grammar("required"))
    assert allows("Just words.", grammar("auto"))
    if form.opens:
        assert allows("Let me look.\n" + written, grammar("auto"))
    answer = Grammar.of_schema({"type": "object", "properties": {"say": {"type": "string"}}})
    assert allows('{"say":"hi"}', grammar("auto", answer=answer))
    assert not allows('{"say": "hi"}', grammar("auto", answer=answer))
    assert allows(written, grammar("auto", answer=answer))
    assert not allows("Just words.", grammar("auto", answer=answer))


CHANNEL, TYPED = "<|channel|>commentary", "<|constrain|>json<|message|>"
END = "<|end|><|start|>assistant"
# How gpt-oss writes a call: behind thoughts or at once, in both orders.
BEHIND = [
    f"<|channel|>analysis<|message|>Hm.{END}{CHANNEL} to=functions.weather {TYPED}",
    f"<|channel|>analysis<|message|>Hm.{END} to=functions.weather{CHANNEL} {TYPED}",
    f"{CHANNEL} to=functions.weather {TYPED}",
    f" to=functions.weather{CHANNEL} json<|message|>",
]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("head", BEHIND)
def test_a_call_of_gpt_oss_ends_its_thoughts(
    tokenizer: Tokenizer, compiler: GrammarCompiler, head: str, seed: int
) -> None:
    [markers] = [family for family in FAMILIES if family.calls]
    thoughts, text = ThinkingSplitter(markers), head + PARIS
    pieces = [thoughts.push(piece) for piece in cut(text, seed)] + [thoughts.flush()]
    assert "".join(each.thinking for each in pieces) == ("Hm." if "Hm." in head else "")
    said, [call] = split(HARMONY, [each.answer for each in pieces])
    assert (said, call.name, json.loads(call.arguments)) == ("", "weather", {"city": "Paris"})

    for way in ("required", "auto"):
        grammar = tool_grammar(HARMONY, TOOLS, way, tokenizer.as_lark)
        for each, is_allowed in ((text, True), (text.replace('"Paris"', "5"), False)):
            matcher = compiler.compile(grammar, Prompt([1], markers=markers)).matcher
            ids = tokenizer.encode(each, add_special_tokens=False, parse_special=True)
            assert (matcher.count_allowed([*ids, 0]) == len(ids) + 1) is is_allowed
    answer = Grammar.of_schema({"type": "object"})
    matcher = compiler.compile(answer, Prompt([1], markers=markers)).matcher
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
    assert matcher.count_allowed([*ids, 0]) <= len(ids)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_special_text_in_names_and_arguments_is_text(
    tokenizer: Tokenizer, compiler: GrammarCompiler, name: str
) -> None:
    special = ("<|im_end|>", "</tool_call>", "[TOOL_CALLS]")
    tool_name = f"f{special[0]}"
    schema = {"properties": {special[1]: {"const": special[2]}}, "required": [special[1]]}
    schema["additionalProperties"] = False
    form = FORMATS[name]
    tools = [Tool(tool_name, schema)]
    grammar = tool_grammar(form, tools, "required", tokenizer.as_lark, are_parallel=False)
    matcher = compiler.compile(grammar, Prompt([1], marks=form.marks)).matcher
    matcher.limit(100)
    said = list[int]()
    while not matcher.is_finished and len(said) < 100:
        mask = matcher.mask([], tokenizer.num_token_ids)
        assert mask is not None
        said.append(int(np.flatnonzero(mask)[-1]))
        matcher.advance(said[-1])
    text = tokenizer.decode(said, "".join(form.marks))
    _, [call] = split(form, [text])
    assert (call.name, json.loads(call.arguments)) == (tool_name, {special[1]: special[2]})


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_call_within_arguments_is_no_call(name: str) -> None:
    held = {"text": WRITTEN[name]}
    written = WRITTEN[name].replace(PARIS, json.dumps(held))
    for pieces in ([written], list(written)):
        text, [call] = split(FORMATS[name], pieces)
        assert (text, json.loads(call.arguments)) == ("", held)


def cpu_seconds(form: ToolFormat, text: str) -> float:
    began = time.process_time()
    split(form, [text[i : i + 4] for i in range(0, len(text), 4)])
    return time.process_time() - began


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_reading_calls_takes_as_long_as_the_answer_is(name: str) -> None:
    form = FORMATS[name]
    mark = "</tool_call> [TOOL_CALLS]g[ARGS]{} "
    for text in (
        WRITTEN[name].replace("Paris", mark * 800),
        WRITTEN[name].replace("Paris", mark * 800)[:-20],
        " " * 20_000 + WRITTEN[name],
        TWO.get(name, WRITTEN[name]) * 200,
    ):
        assert cpu_seconds(form, text) < 0.5


# Arguments between tags, which are no JSON as a whole.

REPORT = {
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "unit": {"enum": ["km", "mi"]},
        "at": {"$ref": "#/$defs/point"},
    },
    "required": ["text", "count"],
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
TAGGED_TOOLS = [Tool("report", REPORT), Tool("stop", {})]
# For each family: a call of a tool with its arguments, and one of the arguments.
TAGGED = {
    "qwen coder": (
        QWEN_CODER.for_tools(TAGGED_TOOLS),
        "<tool_call>\n<function={}>\n{}</function>\n</tool_call>",
        "<parameter={}>\n{}\n</parameter>\n",
    ),
    "seed": (
        SEED.for_tools(TAGGED_TOOLS),
        "<seed:tool_call>\n<function={}>\n{}</function>\n</seed:tool_call>",
        "<parameter={}>{}</parameter>\n",
    ),
    "glm 4.5": (
        GLM45.for_tools(TAGGED_TOOLS),
        "<tool_call>{}\n{}</tool_call>",
        "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n",
    ),
    "glm 4.7": (
        GLM47.for_tools(TAGGED_TOOLS),
        "<tool_call>{}{}</tool_call>",
        "<arg_key>{}</arg_key><arg_value>{}</arg_value>",
    ),
}


def written(name: str, tool: str = "report", **arguments: str) -> str:
    _, call, argument = TAGGED[name]
    return call.format(tool, "".join(argument.format(*pair) for pair in arguments.items()))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", TAGGED)
def test_tagged_arguments_are_read_by_their_schema(name: str, seed: int) -> None:
    form, *_ = TAGGED[name]
    closes = form.closes.strip()
    said = f"5\nand {closes} here"
    call = written(name, text=said, count="5", unit="km", at='{"x": 2}')
    text, calls = split(form, cut(f"So: {call}\n{written(name, 'stop')}", seed))
    assert text.strip() == "So:"
    expected = {"text": said, "count": 5, "unit": "km", "at": {"x": 2}}
    assert [(each.name, json.loads(each.arguments)) for each in calls] == [
        ("report", expected),
        ("stop", {}),
    ]
    nothing = '<tool_call>\n{"name":3}\n</tool_call>'
    unended = call.partition("</function>")[0].removesuffix("</tool_call>")
    for broken in (nothing, unended, call[:-30], "a <parameter=x> <arg_key> b"):
        assert split(form, cut(broken, seed)) == (broken, [])
    assert cpu_seconds(form, written(name, text=f"{closes} " * 3000, count="1")) < 0.5


@pytest.mark.parametrize("name", TAGGED)
def test_tagged_arguments_are_forced_to_their_schema(
    tokenizer: Tokenizer, compiler: GrammarCompiler, name: str
) -> None:
    form, *_ = TAGGED[name]

    def allows(text: str, way: str) -> bool:
        grammar = tool_grammar(form, TAGGED_TOOLS, way, tokenizer.as_lark)  # type: ignore[arg-type]
        matcher = compiler.compile(grammar, Prompt([1])).matcher
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        assert tokenizer.decode(ids, "".join(form.marks)) == text
        return matcher.count_allowed([*ids, 0]) == len(ids) + 1

    for way in ("required", "auto"):
        assert allows(written(name, text="two\nlines < 3", count="5"), way)
        assert allows(written(name, text="", count="-7", unit="mi", at='{"x": 2}'), way)
        assert allows(written(name, "stop"), way)
        assert allows(written(name, "stop") + written(name, "stop"), way)
        assert allows(written(name, text="a", count="5") + "\n" + written(name, "stop"), way)
        assert not allows(written(name, text="a"), way)  # without its count
        assert not allows(written(name, text="a", count="many"), way)
        assert not allows(written(name, text="a", count="5", unit="yd"), way)
        assert not allows(written(name, text="a", count="5", at='{"x": "no"}'), way)
        assert not allows(written(name, "rain", text="a", count="5"), way)
    assert allows("Just words.", "auto")
    assert not allows("Just words.", "required")
    assert allows("Let me look.\n" + written(name, "stop"), "auto")


# What the templates of GLM-4.5 and 4.7 have in common; `~` is where the first of them breaks lines.
GLM_TEMPLATE = (
    "{% if tools %}Write <tool_call>{name}~<arg_key>{key}</arg_key>~<arg_value>{value}</arg_value>~"
    "</tool_call>{% endif %}{% for m in messages %}<|observation|>{% for c in m.tool_calls or [] %}"
    "<tool_call>{{ c.function.name }}~{% for k, v in c.function.arguments.items() %}"
    "<arg_key>{{ k }}</arg_key>~<arg_value>{{ v if v is string else v | tojson }}</arg_value>~"
    "{% endfor %}</tool_call>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize(("name", "line"), [("glm 4.5", "\n"), ("glm 4.7", "")])
def test_calls_of_glm_are_written_as_its_template_writes_them(name: str, line: str) -> None:
    template = GLM_TEMPLATE.replace("~", line)
    form = find_tool_format(template)
    assert form is not None
    assert form.for_tools(TAGGED_TOOLS) == TAGGED[name][0]
    called = {"name": "report", "arguments": {"text": "hi", "count": 5}}
    said = [{"role": "assistant", "content": "", "tool_calls": [{"function": called}]}]
    prompt = Tokenizer(lambda: None, {}, {"default": template}).render_chat(Conversation(said))  # type: ignore[arg-type,return-value]
    assert prompt == "<|observation|>" + written(name, text="hi", count="5")
    # Hunyuan writes alike, but not the same.
    assert find_tool_format(template.replace("{name}", "{name}<tool_sep>")) is None


@pytest.mark.parametrize("form", [GLM45, GLM47], ids=["glm 4.5", "glm 4.7"])
@pytest.mark.parametrize("gap", ["", "\n", " \n "])
def test_calls_of_glm_are_read_with_line_breaks_and_without(form: ToolFormat, gap: str) -> None:
    pieces = ["<tool_call>", "report"]
    for key, value in (("text", " 5\n"), ("count", "5"), ("new", "5")):
        pieces += [f"<arg_key>{key}</arg_key>", f"<arg_value>{value}</arg_value>"]
    call = gap.join([*pieces, "</tool_call>"])
    said = f"So: {call}\n" + gap.join(["<tool_call>", "stop", "</tool_call>"])
    form = form.for_tools(TAGGED_TOOLS)
    for cuts in ([said], list(said), *(cut(said, seed) for seed in range(4))):
        text, calls = split(form, cuts)
        assert text == "So: \n"
        assert [(each.name, json.loads(each.arguments)) for each in calls] == [
            ("report", {"text": " 5\n", "count": 5, "new": "5"}),
            ("stop", {}),
        ]
    words = "The tag <tool_call> begins a call, and </tool_call> ends it."
    assert split(form, cut(words, 1)) == (words, [])
    assert cpu_seconds(form, f"<tool_call>{' ' * 20_000}stop{' ' * 20_000}</tool_call>") < 0.5


# Gemma 4's: like JSON with bare names, and a token for the quotes of strings.

TRIP = {
    "properties": {
        "text": {"type": "string"},
        "days": {"type": "integer"},
        "Unit": {"enum": ["km", "mi"]},
        "stops": {"type": "array", "items": {"type": "string"}},
        "at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]},
    },
    "required": ["text", "days"],
}
TRIP_TOOLS = [Tool("trip", TRIP), Tool("stop", {})]


def gemma(inside: str, tool: str = "trip") -> str:
    return f"<|tool_call>call:{tool}{{{inside}}}<tool_call|>".replace("'", '<|"|>')


FULL = "at:{x:2.5},days:3,stops:['Oslo','a}b'],text:'say \"hi\", <tool_call|>',Unit:'km'"


@pytest.mark.parametrize("seed", range(4))
def test_calls_of_gemma_4_are_read(seed: int) -> None:
    said = f"So: {gemma(FULL)}{gemma('', 'stop')}"
    text, calls = split(GEMMA4, cut(said, seed))
    assert text == "So: "
    assert [(each.name, json.loads(each.arguments)) for each in calls] == [
        (
            "trip",
            {
                "at": {"x": 2.5},
                "days": 3,
                "stops": ["Oslo", "a}b"],
                "text": 'say "hi", <tool_call|>',
                "Unit": "km",
            },
        ),
        ("stop", {}),
    ]
    for broken in (gemma("days"), gemma("days:3")[:-15], gemma("days:{" * 50), gemma("text:'a")):
        assert split(GEMMA4, cut(broken, seed)) == (broken, [])
    assert cpu_seconds(GEMMA4, gemma(f"text:'{'<tool_call|> ' * 5000}'")) < 0.5


def test_calls_of_gemma_4_are_forced_to_their_schema(
    tokenizer: Tokenizer, compiler: GrammarCompiler
) -> None:
    def allows(text: str, way: str) -> bool:
        grammar = tool_grammar(GEMMA4, TRIP_TOOLS, way, tokenizer.as_lark)  # type: ignore[arg-type]
        matcher = compiler.compile(grammar, Prompt([1])).matcher
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        return matcher.count_allowed([*ids, 0]) == len(ids) + 1

    for way in ("required", "auto"):
        assert allows(gemma("days:3,text:'a, b'"), way)
        assert allows(gemma("at:{x:-1e3},days:3,stops:[],text:'',Unit:'mi'"), way)
        assert allows(gemma("days:0,stops:['a','b'],text:'x'") + gemma("", "stop"), way)
        assert not allows(gemma("days:3"), way)  # without its text
        assert not allows(gemma("days:'3',text:'a'"), way)
        assert not allows(gemma("days:3,text:'a',Unit:'yd'"), way)
        assert not allows(gemma("at:{},days:3,text:'a'"), way)
        assert not allows(gemma("days:3,text:'a',more:1"), way)
        assert not allows(gemma("days:3,text:'a'", "rain"), way)
    assert allows("Just words.", "auto")
    assert not allows("Just words.", "required")
    assert allows("Let me look.\n" + gemma("", "stop"), "auto")
