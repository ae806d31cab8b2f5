"""The required format of an answer: a JSON schema, a regular expression, a grammar."""

import json
import re
from dataclasses import dataclass
from typing import Any, Literal, get_args

from localllm.errors import RequestError
from localllm.text.tool_schemas import without_nulls

GrammarKind = Literal["json_schema", "regex", "lark", "calls"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
MAX_GRAMMAR_BYTES = 256 << 10
# For a grammar to be compiled and tried; and to wait for that.
MAX_GRAMMAR_SECONDS, MAX_GRAMMAR_QUEUE_SECONDS = 1, 5
MAX_SCHEMA_DEPTH = 32
# Schemas, names and constants. The time to compile grows with the square of the number of optional
# names: 0.25 s for the 2,000 that this allows, each with its schema.
MAX_SCHEMA_OBJECTS = 4096
# Of a Lark grammar. The compiler descends from rule to rule recursively, on its stack.
MAX_RULES = 1000
_RULE = re.compile(r"\s*[?!]*[A-Za-z_][\w-]*[^:\"/]*:")
# JSON within other text may be laid out in lines or with single spaces, as a family writes its
# calls; without a bound, a confused model writes whitespace forever.
JSON_SPACE = r"( |\r?\n[ \t]{0,32})?"
# JSON of a schema with this keyword is written without spaces, in as few tokens as possible, as an
# answer that is nothing else is too.
COMPACT = "x-localllm-compact"
# A schema with this keyword, in a grammar of calls, is held as far as it can be enforced.
LOOSE = "x-localllm-loose"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that an answer may be, described by `source`.

    `source` is a JSON schema as JSON (draft 2020-12), a regular expression (Rust's syntax, without
    look-around) or a grammar in Lark's notation. "calls" is for tool calls: a grammar that names
    tokens by their ids, which only tool_calls.py writes. Whether a grammar can be used is found out
    when it is compiled.
    """

    kind: GrammarKind
    source: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS or not isinstance(self.source, str):
            raise RequestError(f"a grammar is one of {', '.join(GRAMMAR_KINDS)}", param="grammar")
        try:
            size = len(self.source.encode())
        except UnicodeEncodeError as error:
            raise RequestError("the grammar is not valid Unicode", param="grammar") from error
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"the grammar has {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are allowed",
                param="grammar",
            )
        if self.kind in ("lark", "calls"):
            num_rules = sum(_RULE.match(line) is not None for line in self.source.splitlines())
            if num_rules > MAX_RULES:
                raise RequestError(
                    f"the grammar has {num_rules:,} rules; at most {MAX_RULES:,} are allowed",
                    param="grammar",
                )
        if not self.source.strip():
            raise RequestError("the grammar is empty", param="grammar")

    @classmethod
    def of_schema(cls, schema: Any, param: str = "grammar") -> "Grammar":
        """The grammar of JSON that is valid under `schema`, a JSON value. Raises: RequestError."""
        if not isinstance(schema, (dict, bool)):
            raise RequestError("a JSON schema must be an object, true or false", param=param)
        check_schema_size(schema, param)
        schema = without_nulls(schema)
        source = json.dumps(schema, ensure_ascii=False)
        try:
            source.encode()
        except UnicodeEncodeError:  # a lone surrogate, in a description for example
            source = json.dumps(schema)
        return cls("json_schema", source)

    @classmethod
    def any_object(cls) -> "Grammar":
        """The grammar of any JSON object."""
        return cls.of_schema({"type": "object"})


def lark_literal(text: str) -> str:
    """`text` as a literal in Lark's notation."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def rule_of_text(name: str, end: str) -> str:
    """A rule in Lark's notation for text up to `end`, which is written in it too."""
    # A token of its own is in no text; others end a text where they first come.
    lazy = "" if end.endswith("]>") else "[lazy]"
    return f"{name}{lazy}: TEXT {end}"


def refused(named: str, reason: str, where: str = "") -> RequestError:
    """The error for a format that cannot be used; `named` is its kind, such as "JSON schema"."""
    return RequestError(
        f"the {named} cannot be used: {reason[:300]}", param="grammar", where=where[:300]
    )


def check_schema_size(schema: Any, param: str = "grammar") -> None:
    """Check the size of a JSON schema before anything reads it. Raises: RequestError."""
    level = [schema] if isinstance(schema, (dict, list)) else []
    num_levels = num_counted = 0
    while level and num_levels <= MAX_SCHEMA_DEPTH and num_counted <= MAX_SCHEMA_OBJECTS:
        num_levels += 1
        inner = list[Any]()
        for each in level:
            num_counted += _num_parts(each)
            if num_counted > MAX_SCHEMA_OBJECTS:
                break
            values = each.values() if isinstance(each, dict) else each
            inner += [value for value in values if isinstance(value, (dict, list))]
        level = inner
    if num_levels > MAX_SCHEMA_DEPTH or num_counted > MAX_SCHEMA_OBJECTS:
        raise RequestError(
            f"the JSON schema is too large: at most {MAX_SCHEMA_DEPTH} levels and "
            f"{MAX_SCHEMA_OBJECTS:,} schemas, names and constants are allowed",
            param=param,
        )


def _num_parts(value: dict[str, Any] | list[Any]) -> int:
    """The entries of a list, or the schemas, lists and property names of an object."""
    if isinstance(value, list):
        return len(value)
    num_names = sum(
        len(names)
        for keyword in ("properties", "patternProperties")
        if isinstance(names := value.get(keyword), dict)
    )
    return num_names + sum(isinstance(each, (dict, list, bool)) for each in value.values())
