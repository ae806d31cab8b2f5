"""What an answer has to look like: a JSON schema, a regular expression, a grammar."""

import json
import re
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal, get_args

from localllm.errors import RequestError

GrammarKind = Literal["json_schema", "regex", "lark"]
GRAMMAR_KINDS: tuple[GrammarKind, ...] = get_args(GrammarKind)
MAX_GRAMMAR_BYTES = 256 << 10
MAX_SCHEMA_DEPTH = 32
# Compiling takes a time that grows with the square of the names that may be left out.
MAX_SCHEMA_OBJECTS = 2048
# Of a Lark grammar. Who compiles follows each from the one that names it, on its own stack.
MAX_RULES = 1000
_RULE = re.compile(r"\s*[?!]*[A-Za-z_][\w-]*[^:\"/]*:")
# JSON may be laid out, in lines or with single spaces; without a bound, a model that is at a loss
# writes space for ever.
JSON_SPACE = r"( |\r?\n[ \t]{0,32})?"


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that an answer may be: those that `source` describes.

    `source` is a JSON schema as JSON (draft 2020-12), a regular expression (Rust's syntax; without
    looking around) or a grammar in Lark's notation. Whether it can be followed is found out where
    it is compiled.
    """

    kind: GrammarKind
    source: str

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS or not isinstance(self.source, str):
            raise RequestError(f"a grammar is one of {', '.join(GRAMMAR_KINDS)}", param="grammar")
        size = len(self.source.encode(errors="replace"))
        if size > MAX_GRAMMAR_BYTES:
            raise RequestError(
                f"the grammar has {size:,} bytes; at most {MAX_GRAMMAR_BYTES:,} are read",
                param="grammar",
            )
        if self.kind == "lark":
            num_rules = sum(_RULE.match(line) is not None for line in self.source.splitlines())
            if num_rules > MAX_RULES:
                raise RequestError(
                    f"the grammar has {num_rules:,} rules; at most {MAX_RULES:,} are followed",
                    param="grammar",
                )
        if not self.source.strip():
            raise RequestError("the grammar is empty", param="grammar")

    @classmethod
    def of_schema(cls, schema: Any, param: str = "grammar") -> "Grammar":
        """JSON that validates against `schema`, which is JSON itself. Raises: RequestError."""
        if not isinstance(schema, (dict, bool)):
            raise RequestError("a JSON schema is an object, true or false", param=param)
        levels = _levels(schema) if isinstance(schema, dict) else []
        if len(levels) > MAX_SCHEMA_DEPTH or sum(levels) > MAX_SCHEMA_OBJECTS:
            raise RequestError(
                f"the JSON schema is too large: at most {MAX_SCHEMA_DEPTH} levels and "
                f"{MAX_SCHEMA_OBJECTS:,} objects and lists are read",
                param=param,
            )
        return cls("json_schema", json.dumps(schema, ensure_ascii=False))

    @classmethod
    def any_object(cls) -> "Grammar":
        """Any JSON object."""
        return cls.of_schema({"type": "object"})


def _levels(value: Any) -> list[int]:
    """How many objects and lists stand at each level, as far as more than enough of them."""
    counts, level = list[int](), [value]
    while level and len(counts) <= MAX_SCHEMA_DEPTH:
        counts.append(len(level))
        children = chain.from_iterable(
            each.values() if isinstance(each, dict) else each for each in level
        )
        level = [child for child in children if isinstance(child, (dict, list))]
    return counts
