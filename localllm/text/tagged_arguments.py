"""Arguments of a tool call that stand between tags, each as plain text or as JSON:

    <parameter=city>Paris</parameter>

Strings are written as they are, everything else as JSON. Source: the chat templates of Qwen3-Coder,
Qwen3.5 and Seed-OSS, which tell the model so.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from localllm.text.grammar import LOOSE, lark_literal
from localllm.text.quoted_spans import EndOutsideQuotes

_OPENS, _CLOSES = "<parameter=", "</parameter>"
# What schemas of arguments may refer to, and how they are read.
_SHARED = ("$defs", "definitions", LOOSE)
_NAME = re.compile(r"<function=([^>\n]{1,200})>")
_KEY = re.compile(r"<parameter=([^>\n]{1,200})>")


@dataclass(frozen=True, slots=True)
class TaggedArguments:
    """See ArgumentStyle: `gap` stands on both sides of a value. `schemas`: of each tool's
    arguments, by the names of tool and argument.
    """

    gap: str
    schemas: Mapping[str, Mapping[str, Any]]

    marks = ()

    def with_schemas(self, schemas: Mapping[str, Mapping[str, Any]]) -> "TaggedArguments":
        """See ArgumentStyle."""
        return replace(self, schemas=schemas)

    def end_of_call(self, mark: str) -> EndOutsideQuotes:
        """See ArgumentStyle."""
        return EndOutsideQuotes(mark.strip("\n"), _OPENS, _CLOSES)

    def rules(
        self, name: str, parameters: Mapping[str, Any], as_lark: Callable[[str], str]
    ) -> list[str]:
        """See ArgumentStyle. Patterns and lengths of strings are not held: they are free text."""
        return [f"{name}: {self._body(parameters, as_lark)}"]

    def _body(self, parameters: Mapping[str, Any], as_lark: Callable[[str], str]) -> str:
        properties = parameters.get("properties")
        end = as_lark(self.gap + _CLOSES)
        if not isinstance(properties, Mapping) or not properties:
            return f'({as_lark(_OPENS)} /[^>\\n]+/ {as_lark(">" + self.gap)} tagged_text "\\n")*'
        parts = []
        for name, schema in properties.items():
            schema = schema if isinstance(schema, Mapping) else {}
            begin = f"{as_lark(_OPENS)} {lark_literal(name)} {as_lark('>' + self.gap)}"
            if is_text(schema):
                choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
                value = "tagged_text"
                if choices is not None:
                    value = f"({' | '.join(map(lark_literal, choices))}) {end}"
            else:
                shared = {name: parameters[name] for name in _SHARED if name in parameters}
                value = f"%json {json.dumps({**shared, **schema}, ensure_ascii=False)} {end}"
            part = f'{begin} {value} "\\n"'
            parts.append(part if name in parameters.get("required", ()) else f"({part})?")
        return " ".join(parts)

    def shared_rules(self, as_lark: Callable[[str], str]) -> list[str]:
        """See ArgumentStyle."""
        return [f"tagged_text[lazy]: TEXT {as_lark(self.gap + _CLOSES)}"]

    def read(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """See ArgumentStyle."""
        head = _NAME.search(text)
        if head is None:
            return None
        schemas, arguments, place = self.schemas.get(head[1], {}), dict[str, Any](), head.end()
        while (key := _KEY.search(text, place)) is not None:
            end = text.find(_CLOSES, key.end())
            if end < 0:
                return None
            value, place = text[key.end() : end], end + len(_CLOSES)
            value = value.removeprefix(self.gap).removesuffix(self.gap)
            arguments[key[1]] = _value(value, schemas.get(key[1]))
        return (head[1], arguments) if "</function>" in text[place:] else None


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
