"""Arguments of a tool call as Gemma 4 writes them: like JSON, but names are bare, and a token of
its own stands for the quotes of a string, which needs no escapes.

    {city:<|"|>Paris<|"|>,days:3}

Source: Gemma 4's chat template (`format_argument`), which sorts names without regard to case.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from localllm.text.argument_style import ArgumentStyle, EndOutsideQuotes
from localllm.text.grammar import lark_literal, rule_of_text

_QUOTE = '<|"|>'
_NAME = re.compile(r"call:([^{}]{1,200})\{")
_KEY = re.compile(r"\s*([^:{}\[\],]{1,200}):")
_BARE = re.compile(r"\s*(-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null)")
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_RULES = (
    "quoted_integer: /-?(0|[1-9][0-9]*)/",
    r"quoted_number: /-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?/",
    'quoted_boolean: "true" | "false"',
    'quoted_null: "null"',
    "quoted_any: quoted_string | quoted_number | quoted_boolean | quoted_null | quoted_array"
    " | quoted_object",
    'quoted_array: "[" (quoted_any ("," quoted_any)*)? "]"',
    'quoted_object: "{" quoted_pairs? "}"',
    'quoted_pairs: quoted_pair ("," quoted_pair)*',
    r'quoted_pair: /[^:{}\[\],]+/ ":" quoted_any',
)
_MAX_DEPTH = 32


@dataclass(frozen=True, slots=True)
class QuotedArguments(ArgumentStyle):
    """What is written says itself what is text. Patterns, lengths and references are not held."""

    marks = (_QUOTE,)

    def with_schemas(self, schemas: Mapping[str, Mapping[str, Any]]) -> "QuotedArguments":
        return self

    def rules(
        self, name: str, parameters: Mapping[str, Any], as_lark: Callable[[str], str]
    ) -> list[str]:
        writer = _Rules(as_lark)
        body = writer.pairs(name, parameters, 0)
        return [f"{name}: {body}", *writer.rules]

    def shared_rules(self, as_lark: Callable[[str], str]) -> list[str]:
        quote = as_lark(_QUOTE)
        text = rule_of_text("quoted_text", quote)
        return [f"quoted_string: {quote} quoted_text", text, *_RULES]

    def read(self, text: str) -> tuple[str, dict[str, Any]] | None:
        head = _NAME.search(text)
        if head is None:
            return None
        try:
            found, _ = _read_object(text, head.end(), 0)
        except ValueError:
            return None
        return head[1], found

    def end_of_call(self, mark: str) -> EndOutsideQuotes:
        return EndOutsideQuotes(mark, _QUOTE, _QUOTE)


class _Rules:
    """Writes the rules of one tool's arguments."""

    def __init__(self, as_lark: Callable[[str], str]) -> None:
        self._as_lark = as_lark
        self.rules: list[str] = []

    def pairs(self, name: str, schema: Mapping[str, Any], depth: int) -> str:
        """An expression for the pairs of an object, in the order of their names."""
        properties = schema.get("properties")
        if not isinstance(properties, Mapping) or not properties:
            return "quoted_pairs?" if schema.get("additionalProperties", True) else '""'
        required = schema.get("required", ())
        keys = sorted(properties, key=str.lower)
        # Rule i_0: the pairs from i on, of which none has been written before; i_1: one has.
        self.rules += [f'{name}_{len(keys)}_0: ""', f'{name}_{len(keys)}_1: ""']
        for i, key in enumerate(keys):
            value = self._value(f"{name}_{i}", properties[key], depth)
            for is_begun in (0, 1):
                comma = '"," ' if is_begun else ""
                pair = f'{comma}{lark_literal(key)} ":" {value} {name}_{i + 1}_1'
                other = "" if key in required else f" | {name}_{i + 1}_{is_begun}"
                self.rules.append(f"{name}_{i}_{is_begun}: {pair}{other}")
        return f"{name}_0_0"

    def _value(self, name: str, schema: Any, depth: int) -> str:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return "quoted_any"
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if choices is not None:
            return f"({' | '.join(map(self._literal, choices))})"
        match schema.get("type"):
            case "string" | "integer" | "number" | "boolean" | "null" as kind:
                return f"quoted_{kind}"
            case "array":
                item = self._value(f"{name}_item", schema.get("items"), depth + 1)
                return f'("[" ({item} ("," {item})*)? "]")'
            case "object":
                return f'("{{" {self.pairs(name, schema, depth + 1)} "}}")'
        return "quoted_any"

    def _literal(self, value: Any) -> str:
        if isinstance(value, str):
            quote = self._as_lark(_QUOTE)
            return f"{quote} {lark_literal(value)} {quote}" if value else f"{quote} {quote}"
        if isinstance(value, (dict, list)):
            return "quoted_any"
        words = {True: "true", False: "false", None: "null"}
        is_word = value is None or isinstance(value, bool)
        return lark_literal(words[value] if is_word else str(value))


def _read_object(text: str, at: int, depth: int) -> tuple[dict[str, Any], int]:
    """The pairs from `at` on, and the place after the brace that ends them. Raises: ValueError."""
    found = dict[str, Any]()
    if text[at : at + 1] == "}":
        return found, at + 1
    while True:
        key = _KEY.match(text, at)
        if key is None:
            raise ValueError("a name is missing")
        found[key[1].strip()], at = _read_value(text, key.end(), depth)
        end, at = text[at : at + 1], at + 1
        if end == "}":
            return found, at
        if end != ",":
            raise ValueError("an object does not end")


def _read_value(text: str, at: int, depth: int) -> tuple[Any, int]:
    if depth > _MAX_DEPTH:
        raise ValueError("nested too deeply")
    if text.startswith(_QUOTE, at):
        start = at + len(_QUOTE)
        end = text.find(_QUOTE, start)
        if end < 0:
            raise ValueError("a string does not end")
        return text[start:end], end + len(_QUOTE)
    if text[at : at + 1] == "{":
        return _read_object(text, at + 1, depth + 1)
    if text[at : at + 1] == "[":
        return _read_array(text, at + 1, depth + 1)
    bare = _BARE.match(text, at)
    if bare is None:
        raise ValueError("no value")
    word = bare[1]
    if word in _WORDS:
        return _WORDS[word], bare.end()
    return (float(word) if bare[2] or bare[3] else int(word)), bare.end()


def _read_array(text: str, at: int, depth: int) -> tuple[list[Any], int]:
    found = list[Any]()
    if text[at : at + 1] == "]":
        return found, at + 1
    while True:
        value, at = _read_value(text, at, depth)
        found.append(value)
        end, at = text[at : at + 1], at + 1
        if end == "]":
            return found, at
        if end != ",":
            raise ValueError("a list does not end")
