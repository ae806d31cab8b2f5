"""Arguments of a tool call that stand between tags, each as plain text or as JSON:

    <parameter=city>Paris</parameter>
    <arg_key>city</arg_key><arg_value>Paris</arg_value>

Strings are written as they are, everything else as JSON. Source: the chat templates, which tell the
model so, of Qwen3-Coder, Qwen3.5 and Seed-OSS, and in the second way of GLM-4.5 and later.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.text.argument_style import ArgumentStyle, EndOutsideQuotes
from localllm.text.grammar import LOOSE, lark_literal, rule_of_text

# What schemas of arguments may refer to, and how they are read.
_SHARED = ("$defs", "definitions", LOOSE)
_NAME = re.compile(r"<function=([^>\n]{1,200})>")
_KEY = re.compile(r"<parameter=([^>\n]{1,200})>")
# With line breaks and without, whichever of the two the template shows. A name has no brace: what
# begins with one is JSON, as other families write it.
_BARE_NAME = re.compile(r"<tool_call>\s*([^\s<{]{1,200})\s*(?=<)")
_BARE_KEY = re.compile(r"<arg_key>([^<\n]{1,200})</arg_key>\s*<arg_value>")


@dataclass(frozen=True, slots=True)
class TaggedArguments(ArgumentStyle):
    """An argument is `opens` NAME `between` VALUE `closes` `joint`, and `gap` is on both sides of
    VALUE. `schemas`: of each tool's arguments, by the names of both.
    `name` and `key` find the names of a tool and of an argument; `last` comes behind all of them.
    """

    gap: str
    schemas: Mapping[str, Mapping[str, Any]]
    opens: str = "<parameter="
    between: str = ">"
    closes: str = "</parameter>"
    joint: str = "\n"
    name: re.Pattern[str] = _NAME
    key: re.Pattern[str] = _KEY
    last: str = "</function>"

    @property
    def marks(self) -> tuple[str, ...]:
        return (self.opens, self.between, self.closes)

    def with_schemas(self, schemas: Mapping[str, Mapping[str, Any]]) -> "TaggedArguments":
        return replace(self, schemas=schemas)

    def end_of_call(self, mark: str) -> EndOutsideQuotes:
        return EndOutsideQuotes(mark.strip("\n"), self.opens, self.closes)

    def rules(
        self, name: str, parameters: Mapping[str, Any], as_lark: Callable[[str], str]
    ) -> list[str]:
        """Patterns and lengths of strings are not held: they are free text."""
        return [f"{name}: {self._body(parameters, as_lark)}"]

    def _body(self, parameters: Mapping[str, Any], as_lark: Callable[[str], str]) -> str:
        properties = parameters.get("properties")
        opens, between = as_lark(self.opens), as_lark(self.between + self.gap)
        end, joint = as_lark(self.gap + self.closes), as_lark(self.joint) if self.joint else ""
        if not isinstance(properties, Mapping) or not properties:
            return f"({opens} /[^{self.between[0]}\\n]+/ {between} tagged_text {joint})*"
        parts = []
        for name, schema in properties.items():
            schema = schema if isinstance(schema, Mapping) else {}
            begin = f"{opens} {lark_literal(name)} {between}"
            if is_text(schema):
                choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
                value = "tagged_text"
                if choices is not None:
                    value = f"({' | '.join(map(lark_literal, choices))}) {end}"
            else:
                shared = {name: parameters[name] for name in _SHARED if name in parameters}
                value = f"%json {json.dumps({**shared, **schema}, ensure_ascii=False)} {end}"
            part = f"{begin} {value} {joint}"
            parts.append(part if name in parameters.get("required", ()) else f"({part})?")
        return " ".join(parts)

    def shared_rules(self, as_lark: Callable[[str], str]) -> list[str]:
        return [rule_of_text("tagged_text", as_lark(self.gap + self.closes))]

    def read(self, text: str) -> tuple[str, dict[str, Any]] | None:
        head = self.name.search(text)
        if head is None:
            return None
        schemas, arguments, place = self.schemas.get(head[1], {}), dict[str, Any](), head.end()
        while (key := self.key.search(text, place)) is not None:
            end = text.find(self.closes, key.end())
            if end < 0:
                return None
            value, place = text[key.end() : end], end + len(self.closes)
            value = value.removeprefix(self.gap).removesuffix(self.gap)
            arguments[key[1]] = _value(value, schemas.get(key[1]))
        return (head[1], arguments) if self.last in text[place:] else None


# GLM-4.5 and 4.6 write each part in a line of its own, later ones all in one.
KEYS_IN_LINES = TaggedArguments(
    gap="",
    schemas={},
    opens="<arg_key>",
    between="</arg_key>\n<arg_value>",
    closes="</arg_value>",
    name=_BARE_NAME,
    key=_BARE_KEY,
    last="</tool_call>",
)
KEYS_INLINE = replace(KEYS_IN_LINES, between="</arg_key><arg_value>", joint="")


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether values of a schema are strings, or may be."""
    kinds = schema.get("type")
    given = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    if given:
        return all(isinstance(each, str) for each in given)
    return kinds == "string" or (isinstance(kinds, list) and "string" in kinds)


def _value(text: str, schema: Any) -> Any:
    if not isinstance(schema, Mapping) or is_text(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
