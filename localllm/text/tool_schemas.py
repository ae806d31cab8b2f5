"""The schemas of tools, made whole: clients leave out what a template may need, and send nulls."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Keywords whose values are data, not schemas: a null within them is a value.
_DATA = frozenset({"const", "default", "enum", "examples", "example"})
# Keywords whose values hold schemas by names of the client's.
_NAMED = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_UNIONS = ("anyOf", "oneOf", "allOf")
# Keywords that say what a value is, though its schema has no type.
_TYPE_OF_KEYWORD = {
    "properties": "object",
    "patternProperties": "object",
    "additionalProperties": "object",
    "required": "object",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "pattern": "string",
    "format": "string",
    "minLength": "string",
    "maxLength": "string",
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
}
# Deeper than any schema that is allowed; and the schemas that references may add.
_MAX_DEPTH, _MAX_MADE = 32, 2000


def without_nulls(schema: Any, depth: int = 0) -> Any:
    """A schema whose keywords are absent where they are null. A property that is null may be
    anything.
    """
    if depth > _MAX_DEPTH:
        return schema
    if isinstance(schema, list):
        return [without_nulls(each, depth + 1) for each in schema if each is not None]
    if not isinstance(schema, Mapping):
        return schema
    whole = dict[str, Any]()
    for keyword, value in schema.items():
        if keyword in _DATA:
            # A constant may be null, unless the type is another.
            if value is not None or (keyword == "const" and _may_be_null(schema)):
                whole[keyword] = value
        elif keyword in _NAMED and isinstance(value, Mapping):
            whole[keyword] = {
                name: {} if own is None else without_nulls(own, depth + 2)
                for name, own in value.items()
            }
        elif value is not None:
            whole[keyword] = without_nulls(value, depth + 1)
    if not isinstance(whole.get("required", []), list):
        del whole["required"]  # as the third draft has it, or a mistake
    return whole


def plain_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool without nulls."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    plain = {name: value for name, value in function.items() if value is not None}
    if "parameters" in plain:
        plain["parameters"] = without_nulls(plain["parameters"])
    return {**tool, "function": plain}


def whole_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool with a description and parameters, which are optional."""
    function = tool.get("function")
    if not isinstance(function, Mapping):
        return tool
    given = function.get("parameters") or {}
    first = {"name": function.get("name"), "description": function.get("description", "")}
    parameters = {"type": "object", "properties": {}, **given}
    return {**tool, "function": {**first, **function, "parameters": parameters}}


def told_tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool that says, if only in a word, what its parameters are for and which it needs."""
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(parameters, Mapping):
        return tool
    told = {"required": [], **parameters}
    if isinstance(parameters.get("properties"), Mapping):
        told["properties"] = {
            name: {"description": "", **own} if isinstance(own, Mapping) else own
            for name, own in parameters["properties"].items()
        }
    return {**tool, "function": {**function, "parameters": told}}


@dataclass(frozen=True, slots=True)
class Types:
    """How a template takes types: lists of them; none, where nothing can be read off."""

    takes_lists: bool
    takes_none: bool


def typed_tool(tool: Mapping[str, Any], types: Types) -> Mapping[str, Any]:
    """A tool whose parameters have a type, read off their schemas."""
    function = tool.get("function")
    parameters = function.get("parameters") if isinstance(function, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(parameters, Mapping):
        return tool
    typed = _Typing(parameters, types).typed(parameters, 0)
    return {**tool, "function": {**function, "parameters": typed}}


def with_text_defaults(schema: Any) -> Any:
    """A schema whose defaults are texts, for templates that write them as such."""
    if isinstance(schema, list):
        return [with_text_defaults(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    return {
        name: json.dumps(value, ensure_ascii=False)
        if name == "default" and isinstance(value, bool | int | float)
        else with_text_defaults(value)
        for name, value in schema.items()
    }


class _Typing:
    """Adds types to the schemas of one tool."""

    def __init__(self, root: Mapping[str, Any], types: Types) -> None:
        self._root, self._types = root, types
        self._left = _MAX_MADE

    def typed(self, schema: Any, depth: int, names: frozenset[str] = frozenset()) -> Any:
        """A schema with types; `names`: the references that led to it."""
        self._left -= 1
        if depth > _MAX_DEPTH or self._left < 0:
            return schema
        if not isinstance(schema, Mapping):
            return self.typed({}, depth) if isinstance(schema, bool) else schema
        whole, own = dict(schema), schema.get("type")
        if own is None:
            shown, names = self._shown(schema, names)
            whole |= {name: value for name, value in shown.items() if name not in whole}
        if own is None or (isinstance(own, list) and not self._types.takes_lists):
            kinds = list(dict.fromkeys(self._kinds(schema, 0)))
            self._set_type(whole, kinds)
        if whole.get("type") == "object":  # without properties, Gemma 4 takes keywords for them
            whole.setdefault("properties", {})
        for keyword, value in list(whole.items()):
            if keyword == "properties" and isinstance(value, Mapping):
                inner = {name: self.typed(own, depth + 1, names) for name, own in value.items()}
                whole[keyword] = inner
            elif keyword == "items" and isinstance(value, Mapping):
                whole[keyword] = self.typed(value, depth + 1, names)
        return whole

    def _set_type(self, whole: dict[str, Any], kinds: Sequence[str]) -> None:
        named = [kind for kind in kinds if kind != "null"]
        if "null" in kinds and named:
            whole.setdefault("nullable", True)
        if len(named) > 1 and self._types.takes_lists:
            whole["type"] = named
        elif named or not self._types.takes_none:
            whole["type"] = named[0] if named else "string"

    def _shown(
        self, schema: Mapping[str, Any], names: frozenset[str]
    ) -> tuple[Mapping[str, Any], frozenset[str]]:
        """What a template should see of a schema without a type: the one that is meant."""
        found, name = schema, schema.get("$ref")
        while isinstance(name, str) and name not in names:
            names |= {name}
            target = self._find(name)
            found, name = {**target, **found}, target.get("$ref")
        options = [each for union in _UNIONS for each in found.get(union) or ()]
        meant = [each for each in options if isinstance(each, Mapping) and not _is_null(each)]
        if len(meant) == 1:
            inner, names = self._shown(meant[0], names)
            found = {**inner, **found}
        return {name: found[name] for name in found if name not in ("$ref", *_UNIONS)}, names

    def _find(self, reference: str) -> Mapping[str, Any]:
        found: Any = self._root
        for name in reference.removeprefix("#").split("/")[1:]:
            found = found.get(name.replace("~1", "/")) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def _kinds(self, schema: Any, depth: int) -> Iterator[str]:
        """The types that a schema allows, as far as they can be read off."""
        self._left -= 1
        if self._left < 0 or depth > _MAX_DEPTH or not isinstance(schema, Mapping):
            return
        kind = schema.get("type")
        if isinstance(kind, str):
            yield kind
        elif isinstance(kind, list):
            yield from (each for each in kind if isinstance(each, str))
        elif isinstance(schema.get("enum"), list):
            yield from map(json_type, schema["enum"])
        elif "const" in schema:
            yield json_type(schema["const"])
        elif isinstance(schema.get("$ref"), str):
            yield from self._kinds(self._find(schema["$ref"]), depth + 1)
        elif any(schema.get(union) for union in _UNIONS):
            for each in (each for union in _UNIONS for each in schema.get(union) or ()):
                yield from self._kinds(each, depth + 1)
        else:
            known = (_TYPE_OF_KEYWORD[word] for word in schema if word in _TYPE_OF_KEYWORD)
            yield from list(known)[:1]


def _may_be_null(schema: Mapping[str, Any]) -> bool:
    kind = schema.get("type")
    return kind in (None, "null") or (isinstance(kind, list) and "null" in kind)


def _is_null(schema: Mapping[str, Any]) -> bool:
    return schema.get("type") == "null" or schema.get("const", "") is None


def json_type(value: Any) -> str:
    """The type that JSON Schema has for a value."""
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "number"
        case str():
            return "string"
        case list():
            return "array"
    return "object"
