"""A finished answer is inside its form, whatever text that holds, however tokens are drawn."""

import json
import re
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from functools import cache
from random import Random
from typing import Any

import pytest
from forms import Walker, admits
from in_turns import in_turns
from jsonschema import Draft202012Validator, ValidationError, validators
from seeds import seeds
from tokenizers import AddedToken, decoders, models, normalizers
from tokenizers import Tokenizer as Backend

from localllm.errors import RequestError
from localllm.hub.checkpoint import open_checkpoint
from localllm.text.grammar import Grammar, lark_literal
from localllm.text.prompt import Prompt
from localllm.text.thinking import FAMILIES, Markers
from localllm.text.tokenizer import Tokenizer

CHANNELS, THINK = FAMILIES[0], FAMILIES[-1]
# Texts of special tokens, of tags, of end tokens; and what is easily changed on its way to tokens.
PIECES = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "###",
    "</s>",
    "<unk>",
    "a",
    "ab",
    " ",
    "  b",
    '"',
    "\\",
    "\n",
    "é",
    "e\u0301",
    "ﬁ",
    "😀",
]


def built_in() -> Walker:
    """Special tokens, one of them the end."""
    return Walker(open_checkpoint().tokenizer, [0])


def tags_and_ends() -> Walker:
    """Tags that are not special, and ends that are special, a tag, and a text like any other."""
    backend = open_checkpoint().tokenizer._backend
    backend.add_tokens([AddedToken(mark, special=False) for mark in ("<tool_call>", "###", "é")])
    backend.normalizer = normalizers.NFC()
    tokenizer = Tokenizer(lambda: backend, {}, {})
    texts = ("<|im_end|>", "###", "ab")
    return Walker(tokenizer, [backend.token_to_id(text) for text in texts])


def pieces_with_a_space() -> Walker:
    """In the manner of SentencePiece: the first space of a text is dropped when it is decoded."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += ["▁", "a", "b", "▁a", "▁b", *"<|>/_imendstuk"]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [("▁", "a"), ("▁", "b")]
    model = models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    backend = Backend(model)
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_end|>"])
    return Walker(Tokenizer(lambda: backend, {}, {}), [2])


@cache
def walker(make: Callable[[], Walker]) -> Walker:
    return make()


def some_text(random: Random) -> str:
    return "".join(random.choice(PIECES) for _ in range(random.randint(1, 4)))


def in_numbers(text: str) -> str:
    """A text as an expression, in Rust's syntax."""
    return "".join(f"\\x{{{ord(char):x}}}" for char in text)


def expression(random: Random) -> tuple[str, str]:
    """The same one in Rust's syntax and in Python's."""
    parts = []
    for _ in range(random.randint(1, 3)):
        texts = [some_text(random) for _ in range(random.randint(1, 3))]
        count = random.choice(["", "?", "{1,2}"])
        parts.append(
            (
                f"({'|'.join(map(in_numbers, texts))}){count}",
                f"({'|'.join(map(re.escape, texts))}){count}",
            )
        )
    return "".join(rust for rust, _ in parts), "".join(python for _, python in parts)


def form(random: Random) -> tuple[Grammar, Callable[[str], bool]]:
    """A form with such texts, and whether a text has it."""
    kind = random.choice(["schema", "schema", "regex", "lark", "choice"])
    if kind == "schema":
        schema = schema_of_texts(random)
        return Grammar.of_schema(schema), lambda text: is_valid_json(schema, text)
    if kind == "choice":
        texts = [some_text(random) for _ in range(random.randint(1, 3))]
        return Grammar("lark", f"start: {' | '.join(map(lark_literal, texts))}"), texts.__contains__
    rust, python = expression(random)
    if kind == "lark":
        rust_too, python_too = expression(random)
        source = f"start: {lark_literal('<|im_end|>')} T /{rust}/\nT: /{rust_too}/"
        python = f"{re.escape('<|im_end|>')}({python_too})({python})"
        return Grammar("lark", source), lambda text: re.fullmatch(python, text) is not None
    return Grammar("regex", rust), lambda text: re.fullmatch(python, text) is not None


def schema_of_texts(random: Random) -> Any:
    texts = [some_text(random) for _ in range(3)]
    pattern = "".join(re.escape(char) if char in '"\\ ' else f"[{char}]" for char in texts[0])
    return random.choice(
        [
            {"const": texts[0]},
            {"enum": texts},
            {"const": {texts[0]: [texts[1]]}},
            {
                "type": "object",
                "properties": {texts[0]: {"const": texts[1]}, texts[2]: {"type": "null"}},
                "required": [texts[0]],
                "additionalProperties": False,
            },
            {"type": "string", "pattern": f"^{pattern.replace('[^]', '')}.?$"},
        ]
    )


def is_valid_json(schema: Any, text: str) -> bool:
    try:
        value = json.loads(text, parse_float=Decimal)
    except ValueError:
        return False
    return bool(Checker(schema).is_valid(value))


@pytest.mark.parametrize("seed", seeds(2, 12))
@pytest.mark.parametrize("make", [built_in, tags_and_ends, pieces_with_a_space])
def test_special_text_in_a_form_is_text(make: Callable[[], Walker], seed: int) -> None:
    vocabulary, random, num_finished = walker(make), Random(seed), 0
    special = set(vocabulary.tokenizer._special_ids) | set(vocabulary.end_ids)
    for _ in range(12):
        grammar, matches = form(random)
        compiled = vocabulary.matcher(grammar, 100)
        for _ in range(8):
            token_ids = vocabulary.walk(compiled.copy(), 100, random)
            if token_ids is None:
                continue
            num_finished += 1
            assert special.isdisjoint(token_ids[:-1])
            text = vocabulary.text(grammar, token_ids)
            assert matches(text), (grammar, text)
    assert num_finished > 60


# ECMA-262's patterns, and what they are in Python's syntax.
PATTERNS = {
    "^a": r"\Aa",
    "b$": r"b\Z",
    r"^\d{3}$": r"\A[0-9]{3}\Z",
    r"\s": r"[\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]",
    r"^\S+$": r"\A[^\t-\r \xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff]+\Z",
    r"^\w+$": r"\A[0-9A-Za-z_]+\Z",
    r"^\W\D$": r"\A[^0-9A-Za-z_][^0-9]\Z",
    r'^[^"]*$': r'\A[^"]*\Z',
    r"^[^\\]{1,3}$": r"\A[^\\]{1,3}\Z",
    "^[[:alpha:]]$": r"\A[\[:alph]\]\Z",
    "^[a&&b]+$": r"\A[a\&b]+\Z",
    "^.{2}$": r"\A[^\n\r\u2028\u2029]{2}\Z",
    "a|^b": r"a|\Ab",
    r"^[\u00e0-\u00ff]+$": r"\A[\u00e0-\u00ff]+\Z",
    r"^(?<year>\d\d)-\u{1f600}?$": r"\A[0-9]{2}-\U0001f600?\Z",
}
TEXTS = [
    "",
    "a",
    "ab",
    "ab",
    'x"y',
    "back\\slash",
    "t\t",
    "\x01",
    "\x7f",
    "é",
    "日本",
    "😀",
    "/",
    "<|im_end|>",
]
NUMBERS = [
    0,
    1,
    -1,
    7,
    10,
    100,
    -7,
    0.5,
    -0.5,
    0.1,
    1.5,
    99.99,
    1e3,
    1e-3,
    1e10,
    1e-7,
    1 << 53,
    1e22,
]
FORMATS = ["date", "time", "date-time", "email", "ipv4", "ipv6", "uuid", "binary", "iri", "nothing"]


def draw_value(random: Random, depth: int = 2) -> Any:
    kind = random.random()
    if kind < 0.35:
        return random.choice(TEXTS)
    if kind < 0.6:
        return random.choice(NUMBERS)
    if kind < 0.75 or depth == 0:
        return random.choice([None, True, False])
    values = [draw_value(random, depth - 1) for _ in range(random.randint(0, 3))]
    return values if kind < 0.87 else {random.choice(TEXTS): value for value in values}


def draw_string(random: Random) -> Any:
    schema: dict[str, Any] = {"type": "string"}
    kind = random.random()
    if kind < 0.4:
        schema["pattern"] = random.choice(list(PATTERNS))
    elif kind < 0.65:
        schema["format"] = random.choice(FORMATS)
    if random.random() < 0.3:
        schema["minLength"] = random.randint(0, 4)
    if random.random() < 0.4:
        schema["maxLength"] = random.randint(schema.get("minLength", 0), 12)
    return schema


def draw_number(random: Random) -> Any:
    schema: dict[str, Any] = {"type": random.choice(["number", "integer"])}
    if random.random() < 0.5:
        schema[random.choice(["minimum", "exclusiveMinimum"])] = random.choice(NUMBERS)
    if random.random() < 0.5:
        schema[random.choice(["maximum", "exclusiveMaximum"])] = random.choice(NUMBERS)
    if random.random() < 0.3:
        schema["multipleOf"] = random.choice([2, 3, 7, 10, 0.5, 0.25, 0.1, 1.5, 0.01, 100, 1000])
    return schema


def draw_array(random: Random, depth: int) -> Any:
    schema: dict[str, Any] = {"type": "array", "minItems": random.randint(0, 3)}
    schema["maxItems"] = schema["minItems"] + random.randint(0, 2)
    if random.random() < 0.8:
        schema["items"] = draw_schema(random, depth - 1)
    if random.random() < 0.3:
        schema["prefixItems"] = [
            draw_schema(random, depth - 1) for _ in range(random.randint(1, 3))
        ]
    if random.random() < 0.2:
        schema["uniqueItems"] = False
    return schema


def draw_object(random: Random, depth: int) -> Any:
    names = random.sample(TEXTS, random.randint(0, 4))
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {name: draw_schema(random, depth - 1) for name in names},
        "required": [name for name in names if random.random() < 0.6],
    }
    if random.random() < 0.6:
        schema["additionalProperties"] = random.choice(
            [False, False, True, draw_schema(random, depth - 1)]
        )
    if random.random() < 0.2:
        schema["patternProperties"] = {
            random.choice(list(PATTERNS)): draw_schema(random, depth - 1)
        }
    if random.random() < 0.1:
        schema["minProperties"] = random.randint(0, 2)
    if random.random() < 0.1:
        schema["maxProperties"] = random.randint(0, 5)
    return schema


def draw_schema(random: Random, depth: int = 2) -> Any:
    kind = random.random()
    if kind < 0.25:
        return draw_string(random)
    if kind < 0.45:
        return draw_number(random)
    if kind < 0.53:
        return {"const": draw_value(random)}
    if kind < 0.6:
        return {"enum": [draw_value(random) for _ in range(random.randint(1, 4))]}
    if kind < 0.66 or depth <= 0:
        return random.choice(
            [True, {}, {"type": "boolean"}, {"type": ["string", "null"], "maxLength": 4}]
        )
    if kind < 0.77:
        return draw_array(random, depth)
    if kind < 0.9:
        return draw_object(random, depth)
    branches = [draw_schema(random, depth - 1) for _ in range(random.randint(1, 3))]
    if kind < 0.95:
        return {random.choice(["anyOf", "oneOf"]): branches}
    return {"$defs": {"one": branches[0]}, "allOf": [{"$ref": "#/$defs/one"}, *branches[1:]]}


def check_multiple(_: Any, multiple: Any, value: Any, __: Any) -> Any:
    """Exactly, unlike that of jsonschema."""
    is_number = isinstance(value, (int, Decimal)) and not isinstance(value, bool)
    if is_number and Fraction(value) % Fraction(multiple):
        yield ValidationError(f"{value} is no multiple of {multiple}")


def check_pattern(_: Any, pattern: str, value: Any, __: Any) -> Any:
    if isinstance(value, str) and not re.search(PATTERNS.get(pattern, pattern), value):
        yield ValidationError(f"{value!r} does not match {pattern}")


def check_pattern_properties(checker: Any, patterns: Any, value: Any, _: Any) -> Any:
    for pattern, schema in patterns.items():
        for name in value if isinstance(value, dict) else ():
            if re.search(PATTERNS[pattern], name):
                yield from checker.descend(value[name], schema)


def check_additional(checker: Any, additional: Any, value: Any, schema: Any) -> Any:
    patterns = [PATTERNS[pattern] for pattern in schema.get("patternProperties", {})]
    for name in value if isinstance(value, dict) else ():
        is_listed = name in schema.get("properties", {})
        if not is_listed and not any(re.search(pattern, name) for pattern in patterns):
            yield from checker.descend(value[name], additional)


_NUMBERS = Draft202012Validator.TYPE_CHECKER.redefine(
    "number", lambda _, value: isinstance(value, (int, Decimal)) and not isinstance(value, bool)
).redefine(
    "integer",
    lambda _, value: (
        isinstance(value, (int, Decimal)) and not isinstance(value, bool) and value == value // 1
    ),
)
Validator = validators.extend(
    Draft202012Validator,
    {
        "multipleOf": check_multiple,
        "pattern": check_pattern,
        "patternProperties": check_pattern_properties,
        "additionalProperties": check_additional,
    },
    type_checker=_NUMBERS,
)


def Checker(schema: Any) -> Any:  # noqa: N802
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    return Validator(exact, format_checker=Draft202012Validator.FORMAT_CHECKER)


@pytest.mark.parametrize("seed", seeds(8, 40))
def test_finished_answers_are_valid_by_any_schema(seed: int) -> None:
    vocabulary, random, num_compiled = walker(built_in), Random(seed), 0
    for _ in range(25):
        schema = draw_schema(random)
        try:
            compiled = vocabulary.matcher(Grammar.of_schema(schema), 60)
        except RequestError:
            continue
        num_compiled += 1
        for _ in range(3):
            token_ids = vocabulary.walk(compiled.copy(), 60, random)
            text = (
                "" if token_ids is None else vocabulary.text(Grammar.of_schema(schema), token_ids)
            )
            if text and not re.search(r"[eE][+-]?[0-9]{3}", text):  # else not of Python's numbers
                errors = list(Checker(schema).iter_errors(json.loads(text, parse_float=Decimal)))
                assert not errors, (schema, text)
    assert num_compiled >= 15


@pytest.mark.parametrize(
    ("pattern", "markers", "is_thinking"),
    in_turns(
        [
            r"\n{1,3}[ab]+",
            r"[ \n]{0,5}[ab]",
            r"(<think>|</think>|<\|end\|>)?a(<think>)?",
            r"<think>\n{0,3}a</think>\n{0,3}b?",
            r"\s<think>a",
            r"(.|\n){1,9}",
            r"[0-9]{1,3}",
        ],
        [THINK, CHANNELS],
        [False, True],
    ),
)
def test_an_answer_behind_thoughts_is_told_from_them(
    pattern: str, markers: Markers, is_thinking: bool
) -> None:
    vocabulary, random, grammar = walker(built_in), Random(7), Grammar("regex", pattern)
    prompt = Prompt([1], markers, is_thinking)
    compiled = vocabulary.matcher(grammar, 40, prompt)
    num_finished = 0
    for _ in range(40):
        token_ids = vocabulary.walk(compiled.copy(), 40, random, thinks=True)
        if token_ids is not None:
            num_finished += 1
            text = vocabulary.text(grammar, token_ids, prompt)
            assert admits(grammar, text), (text, vocabulary.tokenizer.decode(token_ids))
    # Who has to write the channels' names letter by letter seldom does so by chance.
    assert num_finished > 10 or (is_thinking and markers is CHANNELS)


def test_thoughts_come_before_any_form_that_does_not_begin_like_them() -> None:
    vocabulary, tokenizer = walker(built_in), open_checkpoint().tokenizer

    def read(pattern: str, text: str, *, parse_special: bool = True) -> str | None:
        grammar, prompt = Grammar("regex", pattern), Prompt([1], THINK)
        token_ids = tokenizer.encode(text, add_special_tokens=False, parse_special=parse_special)
        matcher = vocabulary.matcher(grammar, 90, prompt)
        if matcher.count_allowed(token_ids) < len(token_ids):
            return None
        return vocabulary.text(grammar, token_ids, prompt)

    assert read("[ab]+", "<think>so</think>\n\nab") == "ab"
    assert read("[ab]+", "ab") == "ab"
    assert read("\n*[ab]+", "<think>so</think>\n\nab") == "\n\nab"
    assert read("(<think>)?[ab]+", "<think>ab", parse_special=False) == "<think>ab"
    assert read("(<think>)?[ab]+", "<think>so</think>ab") is None
