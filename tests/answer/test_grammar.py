"""Answers within a grammar: valid, the same with and without drafts, refused where it cannot be."""

import json
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from random import Random

import jsonschema
import numpy as np
import pytest
from schemas import SCHEMAS
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from localllm import LLM
from localllm.answer.grammar_compiler import GrammarCompiler, check_grammar, is_matched
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.errors import RequestError
from localllm.hub.checkpoint import open_checkpoint
from localllm.text.grammar import MAX_GRAMMAR_BYTES, MAX_RULES, MAX_SCHEMA_DEPTH, Grammar
from localllm.text.prompt import Conversation, Prompt
from localllm.text.thinking import Markers
from localllm.text.tokenizer import Tokenizer

QUESTION = [{"role": "user", "content": "Answer in JSON."}]
DIGITS = Grammar("regex", "[0-9]{2}")


@cache
def llm_of(max_num_seqs: int, speculation: SpeculationConfig | None = None) -> LLM:
    """The built-in model; no answer depends on those before it."""
    return LLM(max_num_seqs=max_num_seqs, speculation=speculation or SpeculationConfig())


OFF = SpeculationConfig("off")


def answers(llm: LLM, temperatures: Sequence[float]) -> dict[str, tuple[str, str]]:
    """Text and finish reason for each schema; half of them beside the others."""
    params = [
        llm.sampling_params(
            grammar=Grammar.of_schema(schema),
            max_tokens=250,
            temperature=temperatures[i % len(temperatures)],
            seed=7 + i,
        )
        for i, schema in enumerate(SCHEMAS.values())
    ]
    prompt = llm.model.prompts.write(Conversation(QUESTION))
    running = [llm.model.ask(prompt, each) for each in params]
    for _, events in running:
        for event in events:
            assert event.error is None, event.error
    return {
        name: (completion.text, str(completion.finish_reason))
        for name, (completion, _) in zip(SCHEMAS, running, strict=True)
    }


@pytest.mark.parametrize(
    "temperatures",
    [
        (0.0, 1.0),  # of every second schema
        pytest.param((0.0,), marks=pytest.mark.slow),
        pytest.param((1.0,), marks=pytest.mark.slow),
    ],
)
def test_finished_answers_validate_with_and_without_drafts(temperatures: Sequence[float]) -> None:
    found = answers(llm_of(16), temperatures)
    assert found == answers(llm_of(16, OFF), temperatures)
    finished = {name: text for name, (text, reason) in found.items() if reason == "stop"}
    assert len(finished) >= 45, [name for name in found if name not in finished]
    for name, text in finished.items():
        checker = jsonschema.Draft202012Validator(
            SCHEMAS[name], format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        checker.validate(json.loads(text))


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM()


@pytest.mark.parametrize(
    ("grammar", "expected"),
    [
        (Grammar("regex", r"(red|green) [0-9]{2}"), r"(red|green) [0-9]{2}"),
        (Grammar("lark", 'start: "hi " NAME "!"\nNAME: /[A-Z][a-z]{2}/'), r"hi [A-Z][a-z]{2}!"),
        (Grammar.of_schema({"enum": ["a", "b"]}), r'"a"|"b"'),
        (Grammar("regex", "the only text"), "the only text"),
    ],
)
def test_every_kind_of_grammar_is_followed(llm: LLM, grammar: Grammar, expected: str) -> None:
    params = llm.sampling_params(grammar=grammar, temperature=1.0, n=3, seed=1, max_tokens=50)
    [completion] = llm.chat(QUESTION, params)
    for sample in completion.samples:
        assert re.fullmatch(expected, sample.text)
        assert sample.finish_reason == "stop"


def test_an_answer_ends_with_its_grammar_though_no_end_token_is_wanted(llm: LLM) -> None:
    params = llm.sampling_params(grammar=DIGITS, ignore_eos=True, max_tokens=2)
    [completion] = llm.generate("a", params)
    assert re.fullmatch("[0-9]{2}", completion.text)
    assert completion.finish_reason == "stop"


def test_any_json_object_is_one(llm: LLM) -> None:
    # Texts that end: this model likes to go on.
    likes = dict.fromkeys(llm.model.tokenizer.encode('"}]', add_special_tokens=False), 5.0)
    params = llm.sampling_params(
        grammar=Grammar.any_object(),
        temperature=1.0,
        seed=3,
        max_tokens=300,
        n=8,
        logit_bias=likes,
    )
    [completion] = llm.chat(QUESTION, params)
    finished = [sample.text for sample in completion.samples if sample.finish_reason == "stop"]
    assert finished
    assert all(isinstance(json.loads(text), dict) for text in finished)


def test_log_probabilities_are_those_before_the_grammar(llm: LLM) -> None:
    params = llm.sampling_params(grammar=DIGITS, temperature=0.0, logprobs=3)
    [bound] = llm.chat(QUESTION, params)
    [free] = llm.chat(QUESTION, llm.sampling_params(temperature=0.0, logprobs=3, max_tokens=1))
    token, other = bound.samples[0].tokens[0], free.samples[0].tokens[0]
    assert token.token_id != other.token_id
    assert token.logprobs is not None
    assert other.logprobs is not None
    assert token.logprobs.top == other.logprobs.top
    assert token.logprobs.logprob < token.logprobs.top[-1][1]


REFUSED = {
    "an unclosed group": Grammar("regex", "(a"),
    "looking ahead": Grammar("regex", "(?=a)b"),
    "no rule to begin with": Grammar("lark", "other: /a/"),
    "an unknown rule": Grammar("lark", "start: nowhere"),
    "itself": Grammar("lark", "start: @answer"),
    "an unknown type": Grammar.of_schema({"type": "thing"}),
    "a keyword that cannot be enforced": Grammar.of_schema({"type": "array", "uniqueItems": True}),
    "choices that overlap": Grammar.of_schema({"oneOf": [{"minimum": 1}, {"type": "number"}]}),
    "what nothing can be": Grammar.of_schema({"allOf": [{"type": "null"}, {"type": "string"}]}),
    "a schema elsewhere": Grammar.of_schema({"$ref": "http://127.0.0.1:9/schema"}),
    "a number too large": Grammar.of_schema({"enum": [10**400]}),
    "a file": Grammar.of_schema({"$ref": "file:///etc/passwd"}),
}


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_cannot_be_followed_is_refused_at_once(llm: LLM, name: str) -> None:
    began = time.monotonic()
    with pytest.raises(RequestError, match="cannot be used") as found:
        check_grammar(REFUSED[name])
    assert found.value.param == "grammar"
    [completion] = llm.chat(QUESTION, llm.sampling_params(grammar=REFUSED[name]))
    assert isinstance(completion.error, RequestError)
    assert time.monotonic() - began < 1.0


@pytest.mark.parametrize(
    ("grammar", "reason", "where"),
    [
        (Grammar("regex", "ab(c"), "unclosed group", "character 3 of ab(c"),
        (Grammar("regex", "(?=a)b"), "look-around", "character 1 of (?=a)b"),
        (
            Grammar.of_schema({"type": "string", "pattern": "x["}),
            "unclosed character class",
            "character 2 of x[",
        ),
        (Grammar("lark", 'start: "a" b'), 'unknown name: "b"', 'line 1, character 8: start: "a" b'),
        (Grammar("lark", 'start: "a"\nb "a"'), "Expected token", 'line 2, character 3: b "a"'),
        (
            REFUSED["choices that overlap"],
            "two branches of oneOf may hold at once",
            "oneOf, branches 1 and 2",
        ),
        (Grammar("regex", r"\bab\b"), "look-around, word boundaries and anchors", ""),
        (
            Grammar("lark", "start: <|im_end|>"),
            "<|im_end|> names a token of the model",
            "line 1: start: <|im_end|>",
        ),
    ],
)
def test_a_refusal_says_what_is_wrong_and_where(grammar: Grammar, reason: str, where: str) -> None:
    with pytest.raises(RequestError) as found:
        check_grammar(grammar)
    assert f"cannot be used: {reason}" in found.value.message
    assert found.value.where == where
    assert "coerce" not in str(found.value)


@pytest.mark.parametrize(
    ("grammar", "matching", "other"),
    [
        (Grammar("regex", "[0-9]+"), "17", "number 17"),
        (Grammar("lark", 'start: "ja" | "nein"'), "nein", "neina"),
        (Grammar.of_schema({"type": "object"}), ' {"b": 1,\n "a": 2}', "Here you are: {}"),
    ],
)
def test_an_answer_that_was_not_led_is_held_against_its_form(
    grammar: Grammar, matching: str, other: str
) -> None:
    assert is_matched(grammar, matching)
    assert not is_matched(grammar, other)
    assert not is_matched(grammar, "")


def _chain(length: int) -> str:
    """Rules each of which names the next: whoever follows them on a stack needs a deep one."""
    rules = [f'r{i}: "a" r{i + 1}' for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "b"'])


def _nested(depth: int) -> dict[str, object]:
    return {"type": "object", "properties": {"a": _nested(depth - 1)}} if depth else {}


@pytest.mark.parametrize(
    "make",
    [
        lambda: Grammar("regex", "a" * MAX_GRAMMAR_BYTES + "b"),
        lambda: Grammar("regex", " "),
        lambda: Grammar.of_schema(_nested(MAX_SCHEMA_DEPTH // 2)),
        lambda: Grammar.of_schema({"properties": {f"k{i}": {} for i in range(9000)}}),
        lambda: Grammar.of_schema({"enum": [f"word {i}" for i in range(15000)]}),
        lambda: Grammar("regex", "\ud800"),
        lambda: Grammar("lark", _chain(8000)),
        lambda: Grammar("lark", _chain(8000).replace("r", "T")),
        lambda: Grammar.of_schema([]),
        lambda: Grammar.of_schema(None),
        lambda: Grammar("gbnf", "root ::= a"),  # type: ignore[arg-type]
    ],
)
def test_what_is_too_large_or_no_grammar_is_refused_before_it_is_read(make: object) -> None:
    with pytest.raises(RequestError):
        make()  # type: ignore[operator]


BOMBS = {
    "repeated repetitions": Grammar("regex", "(a{1,1000}){1,1000}{1,100}"),
    "ambiguous repetitions": Grammar("regex", "((a|aa)+)+(x+x+)+y" * 500),
    "many states": Grammar("regex", "(.*a.{30}){9}"),
    "any letter": Grammar("regex", r"(\p{L}{1,100}\s){1,100}[^\p{L}]{50,100}"),
    "a long enumeration": Grammar.of_schema({"enum": [f"word {i}" for i in range(4000)]}),
    "many names": Grammar.of_schema({"properties": {f"k{i}": {} for i in range(2000)}}),
    "many choices": Grammar.of_schema(
        {"anyOf": [{"properties": {f"k{i % 7}": {"pattern": f"a{{{i}}}.*b"}}} for i in range(400)]}
    ),
    "an ambiguous grammar": Grammar("lark", 'start: a a a a a a a a\na: a a | "x" | ""'),
    "a chain of rules": Grammar("lark", _chain(MAX_RULES - 2)),
    "long lists": Grammar.of_schema({"type": "array", "minItems": 90000, "maxItems": 10**7}),
    "deep choices": Grammar(
        "lark",
        "start: r0\n"
        + "\n".join(f"r{i}: r{i + 1} r{i + 1} | r{i + 1}" for i in range(400))
        + '\nr400: "x"',
    ),
}


@pytest.mark.parametrize("name", sorted(BOMBS))
def test_a_bomb_is_refused_or_costs_little(llm: LLM, name: str) -> None:
    prompt = llm.model.prompts.write(Conversation(QUESTION))
    began = time.monotonic()
    with suppress(RequestError):
        llm.model.text_engine.compile(BOMBS[name], prompt)
    # A second for its trial, which may take all of it, and what it took there once more.
    assert time.monotonic() - began < 3.0
    # It may be found out only where it is followed; then this request fails, and no other.
    bomb = llm.sampling_params(grammar=BOMBS[name], max_tokens=20, temperature=1.0, seed=1)
    free = llm.sampling_params(max_tokens=20, temperature=0.0)
    [expected] = llm.chat(QUESTION, free)
    beside, events = llm.model.ask(prompt, free)
    [answer] = llm.chat(QUESTION, bomb)
    assert answer.error is None or isinstance(answer.error, RequestError)
    for _ in events:
        pass
    assert beside.text == expected.text


@pytest.mark.parametrize("num_places", [4, pytest.param(30, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "grammar",
    [
        *(Grammar.of_schema(SCHEMAS[name]) for name in ("a call", "a uuid", "a weather report")),
        Grammar("regex", "(yes|no), (the same thing, ){2}certainly[.!]"),
        Grammar(
            "lark", 'start: "It is " /[0-9]{2}/ " degrees in the " SHADE\nSHADE: "sun"|"shade"'
        ),
    ],
)
def test_a_token_is_allowed_where_the_mask_has_it(
    llm: LLM, grammar: Grammar, num_places: int
) -> None:
    """A processor asks about one token, a GPU gets the mask: they must mean the same."""
    size = llm.model.tokenizer.num_token_ids
    matcher = llm.model.text_engine.compile(
        grammar, llm.model.prompts.write(Conversation(QUESTION))
    ).matcher
    random, draft = Random(0), list[int]()
    for _ in range(num_places):
        mask = matcher.mask(draft, size)
        assert mask is not None
        allowed = np.flatnonzero(mask)
        if set(allowed.tolist()) <= {0, 2}:
            break  # complete: nobody asks any more
        found = [token_id for token_id in range(size) if matcher.allows(draft, token_id)]
        assert found == allowed.tolist(), draft
        bits = np.zeros((len(draft) + 1, -(-size // 32)), dtype=np.int32)
        matcher.fill(draft, bits)
        last = np.unpackbits(bits[-1].view(np.uint8), count=size, bitorder="little")
        assert np.array_equal(last.astype(bool), mask)
        if forced := matcher.forced(4) if not draft else []:
            assert allowed.tolist() == forced[:1]
        token_id = random.choice(allowed.tolist())
        draft.append(token_id)
        if len(draft) == 5 or random.random() < 0.3:
            for each in draft:
                matcher.advance(each)
            draft.clear()


SPECIAL_TEXT = ("<|im_end|>", "<|endoftext|>", "<think>")


@pytest.mark.parametrize("text", SPECIAL_TEXT)
@pytest.mark.parametrize("speculation", [None, OFF])
def test_text_of_special_tokens_in_a_form_is_text(
    text: str, speculation: SpeculationConfig | None
) -> None:
    llm = llm_of(1, speculation)
    written = f"a{text}b"
    forms = {
        Grammar("regex", f"a({re.escape(text)}){{2}}b"): f"a{text}{text}b",
        Grammar("lark", f'start: "a" T "b"\nT: "{text}"'): written,
        Grammar("lark", f"start: /a/ %json {json.dumps({'const': text})}"): f'a"{text}"',
        Grammar.of_schema({"const": written}): f'"{written}"',
        Grammar.of_schema({"enum": [written]}): f'"{written}"',
        Grammar.of_schema({"type": "string", "pattern": f"^a{re.escape(text)}b$"}): f'"{written}"',
    }
    for grammar, expected in forms.items():
        params = llm.sampling_params(grammar=grammar, max_tokens=60, temperature=1.0, seed=1)
        [completion] = llm.chat(QUESTION, params)
        assert (completion.text, completion.finish_reason) == (expected, "stop")
    named = {"type": "object", "properties": {text: {"const": 1}}, "required": [text]}
    params = llm.sampling_params(
        grammar=Grammar.of_schema({**named, "additionalProperties": False}), max_tokens=60
    )
    [completion] = llm.chat(QUESTION, params)
    assert json.loads(completion.text) == {text: 1}


def test_an_end_token_that_is_a_text_like_any_other_ends_no_form() -> None:
    tokenizer = open_checkpoint().tokenizer
    [end_id] = tokenizer.encode(" the", add_special_tokens=False)
    compiler = GrammarCompiler(tokenizer, tokenizer.num_token_ids, frozenset({0, end_id}))
    matcher = compiler.compile(Grammar("regex", "in the( the)* end"), Prompt([1])).matcher
    said = list[int]()
    while not matcher.is_finished:
        mask = matcher.mask([], tokenizer.num_token_ids)
        assert mask is not None
        assert not mask[end_id]
        assert not matcher.allows([], end_id)
        [*_, token_id] = np.flatnonzero(mask).tolist()
        said.append(token_id)
        matcher.advance(token_id)
    assert tokenizer.decode(said) == "in the end"


def test_a_model_without_an_end_token_ends_with_its_grammar() -> None:
    tokenizer = open_checkpoint().tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.num_token_ids, frozenset())
    matcher = compiler.compile(Grammar("regex", "ab?"), Prompt([1])).matcher
    [a_id], [b_id] = (tokenizer.encode(text, add_special_tokens=False) for text in "ab")
    matcher.advance(a_id)
    assert matcher.count_allowed([b_id]) == 1
    mask = matcher.mask([], tokenizer.num_token_ids)
    assert mask is not None
    assert np.flatnonzero(mask).tolist() == [b_id]
    matcher.advance(b_id)
    assert matcher.is_finished


def toy_tokenizer(decoder: decoders.Decoder) -> Tokenizer:
    """One that knows three letters."""
    backend = Backend(models.BPE({"</s>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    backend.decoder = decoder
    backend.add_special_tokens(["</s>"])
    return Tokenizer(lambda: backend, {}, {})


def test_what_a_vocabulary_cannot_write_is_refused() -> None:
    compiler = GrammarCompiler(toy_tokenizer(decoders.ByteLevel()), 4, frozenset({0}))
    assert compiler.compile(Grammar("regex", "ab"), Prompt([1])).matcher.forced(2) == [3]
    for grammar in (Grammar("regex", "a</s>"), Grammar("lark", 'start: "ab" "é"')):
        with pytest.raises(RequestError, match=r"the model has no tokens for '(a</s>|abé)'"):
            compiler.compile(grammar, Prompt([1]))
    # Where it is found out later the request fails.
    matcher = compiler.compile(Grammar("regex", "a(b|cd)|c"), Prompt([1])).matcher
    matcher.advance(1)
    assert matcher.count_allowed([2]) == 1


def test_a_tokenizer_that_no_grammar_can_lead_is_told_as_such() -> None:
    with pytest.raises(RequestError, match="the model's tokenizer") as found:
        GrammarCompiler(toy_tokenizer(decoders.WordPiece()), 4, frozenset({0}))
    assert found.value.hint


THINK = Markers("<think>", "</think>", skip="<think>\n\n</think>\n\n")
SPECIAL = Markers("<|im_start|>thoughts", "<|im_end|>", skip="<|im_start|>answer")


@pytest.mark.parametrize("markers", [THINK, SPECIAL], ids=["text", "special tokens"])
def test_a_grammar_begins_behind_the_thoughts(markers: Markers) -> None:
    tokenizer = open_checkpoint().tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.num_token_ids, frozenset({0}))

    def allows(text: str, *, is_thinking: bool = False) -> bool:
        matcher = compiler.compile(DIGITS, Prompt([1], markers, is_thinking)).matcher
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        return matcher.count_allowed(ids) == len(ids)

    opens, closes = markers.opens, markers.closes
    assert allows("12")
    assert allows(markers.skip + "12")
    assert allows(f"{opens}\nFirst {{this}}.\n\nThen 3.\n{closes}\n\n12")
    assert allows(f"and so on\n{closes}12", is_thinking=True)
    assert not allows("ab")
    assert not allows(f"{opens}so{closes}ab")
    assert not allows(f"so{closes}a", is_thinking=True)
    assert not allows("123")


def test_an_answer_goes_on_within_its_grammar() -> None:
    tokenizer = open_checkpoint().tokenizer
    compiler = GrammarCompiler(tokenizer, tokenizer.num_token_ids, frozenset({0}))

    def said(text: str) -> Prompt:
        ids = tokenizer.encode(text, add_special_tokens=False)
        return Prompt([1, *ids], num_said=len(ids))

    matcher = compiler.compile(DIGITS, said("4")).matcher
    assert matcher.count_allowed(tokenizer.encode("2", add_special_tokens=False)) == 1
    assert matcher.count_allowed(tokenizer.encode("23", add_special_tokens=False)) < 2
    with pytest.raises(RequestError, match="beginning"):
        compiler.compile(DIGITS, said("four"))


OPEN_ENDED = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
NESTED = {
    "type": "object",
    "properties": {
        "items": {"type": "array", "items": {"$ref": "#/$defs/item"}},
        "note": {"type": "string", "minLength": 5},
        "count": {"type": "integer"},
    },
    "required": ["items", "note", "count"],
    "additionalProperties": False,
    "$defs": {
        "item": {
            "type": "object",
            "properties": {"kind": {"enum": ["first", "second"]}, "tags": {"type": "array"}},
            "required": ["kind"],
        }
    },
}


@pytest.mark.parametrize("schema", [OPEN_ENDED, NESTED, {"type": "object"}, {"type": "array"}])
@pytest.mark.parametrize(
    "max_tokens", [40, *(pytest.param(more, marks=pytest.mark.slow) for more in (90, 300))]
)
@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.5])
def test_a_form_is_led_to_its_end_where_tokens_run_short(
    schema: dict[str, object], max_tokens: int, temperature: float
) -> None:
    texts = []
    for speculation in (None, OFF):
        llm = llm_of(4, speculation)
        params = [
            llm.sampling_params(
                grammar=Grammar.of_schema(schema),
                max_tokens=max_tokens,
                temperature=temperature,
                seed=seed,
            )
            for seed in range(4)
        ]
        prompt = llm.model.prompts.write(Conversation(QUESTION))
        running = [llm.model.ask(prompt, each) for each in params]
        for completion, events in running:
            list(events)
            assert completion.finish_reason == "stop", completion.text
            assert completion.num_generated_tokens <= max_tokens
            jsonschema.validate(json.loads(completion.text), schema)
        texts.append([completion.text for completion, _ in running])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("pattern", ["[a-z ]+[.]", "[a-z]+", '("[a-z]*", )*', "([0-9]+;)+"])
def test_a_pattern_without_an_end_ends(pattern: str) -> None:
    llm = llm_of(1)
    params = llm.sampling_params(
        grammar=Grammar("regex", pattern), max_tokens=60, temperature=1.0, seed=1
    )
    completion, events = llm.model.ask(Conversation(QUESTION), params)
    list(events)
    assert completion.finish_reason == "stop"
    assert re.fullmatch(pattern, completion.text)


def test_too_few_tokens_for_any_answer_are_told_as_such() -> None:
    llm = llm_of(1)
    params = llm.sampling_params(grammar=Grammar.of_schema(NESTED), max_tokens=5)
    completion, events = llm.model.ask(Conversation(QUESTION), params)
    list(events)
    assert completion.finish_reason == "length"
