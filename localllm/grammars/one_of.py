"""Rewrites `oneOf` as `anyOf`: if no value is valid under two branches, both mean the same.

Branches are shown to be disjoint by types, ranges, lengths, constants, and the names that an object
must have. Otherwise they are made disjoint, if each of two branches requires a name that the other
does not: each must then do without the other's name, so that only a part of what the standard
allows is valid. If that is not possible either, the schema is refused.

Source: JSON Schema 2020-12, core, section 10.2.1.3.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from localllm.text.grammar import refused
from localllm.text.tool_schemas import json_type

Schema = Any  # an object or a Boolean, as schema.py writes them

_TYPES = frozenset({"null", "boolean", "number", "string", "array", "object"})
_MAPS = ("properties", "patternProperties", "$defs")
_LISTS = ("prefixItems", "allOf", "anyOf", "oneOf")
_SINGLE = ("items", "additionalProperties")
_TAKEN_APART = {"allOf", "anyOf", "enum", "$ref"}
_MAX_DEPTH, _MAX_COMPARISONS, _MAX_ITEMS = 8, 20_000, 8


def settle_one_of(schema: Schema) -> Schema:
    """`schema` without `oneOf`; its references point to its `$defs`. Raises: RequestError."""
    definitions = schema.get("$defs", {}) if isinstance(schema, dict) else {}
    return _Settler(definitions).settle(schema)


@dataclass(slots=True)
class _Facts:
    """What holds for every valid value: all of `all_of`, and one schema of each of `any_of`."""

    all_of: list[Schema] = field(default_factory=list)
    any_of: list[list[Schema]] = field(default_factory=list)
    is_impossible: bool = False


class _Settler:
    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._num_left = _MAX_COMPARISONS

    def settle(self, schema: Schema) -> Schema:
        if not isinstance(schema, dict):
            return schema
        settled = dict(schema)
        for key in _MAPS:
            if key in settled:
                settled[key] = {name: self.settle(each) for name, each in settled[key].items()}
        for key in _LISTS:
            if key in settled:
                settled[key] = [self.settle(each) for each in settled[key]]
        for key in _SINGLE:
            if key in settled:
                settled[key] = self.settle(settled[key])
        if "oneOf" in settled:
            branches = settled.pop("oneOf")
            apart = {"anyOf": self._apart(branches, settled)}
            settled["allOf"] = [*settled.get("allOf", []), apart]
        return settled

    def _apart(self, branches: Sequence[Schema], beside: Schema) -> list[Schema]:
        """The branches, made disjoint among the values that are valid under `beside`."""
        if _are_distinct_constants(branches):
            return list(branches)
        absent: list[list[str]] = [[] for _ in branches]
        for i, j in combinations(range(len(branches)), 2):
            one, other = [beside, branches[i]], [beside, branches[j]]
            if self._are_disjoint(one, other):
                continue
            names = self._name_to_miss(one, other), self._name_to_miss(other, one)
            if names[0] is None or names[1] is None:
                raise refused(
                    "JSON schema",
                    "two branches of oneOf may hold at once; use anyOf, or give each branch a "
                    "constant or a required name of its own",
                    f"oneOf, branches {i + 1} and {j + 1}",
                )
            absent[i].append(names[0])
            absent[j].append(names[1])
        return [
            {"allOf": [branch, {"properties": dict.fromkeys(names, False)}]} if names else branch
            for branch, names in zip(branches, absent, strict=True)
        ]

    def _name_to_miss(self, one: Sequence[Schema], other: Sequence[Schema]) -> str | None:
        """A name that `other` requires and `one` does not, if only objects may be valid under both;
        otherwise None.
        """
        facts, others = self._facts(one), self._facts(other)
        if any(
            not self._differ(kind, facts, others) for kind in _kinds(facts, others) - {"object"}
        ):
            return None
        return next((name for name in _required(others) if name not in _required(facts)), None)

    def _are_disjoint(self, one: Sequence[Schema], other: Sequence[Schema], depth: int = 0) -> bool:
        """Whether it is certain that no value is valid under all of `one` and all of `other`."""
        self._num_left -= 1
        if self._num_left < 0 or depth > _MAX_DEPTH:
            return False
        facts, others = self._facts(one), self._facts(other)
        if facts.is_impossible or others.is_impossible:
            return True
        if all(self._differ(kind, facts, others, depth) for kind in _kinds(facts, others)):
            return True
        for these, those in ((facts, others), (others, facts)):
            for i, options in enumerate(these.any_of):
                rest = these.all_of + _choices(these.any_of[:i] + these.any_of[i + 1 :])
                against = those.all_of + _choices(those.any_of)
                if all(
                    self._are_disjoint([*rest, option], against, depth + 1) for option in options
                ):
                    return True
        return False

    def _facts(self, schemas: Sequence[Schema]) -> _Facts:
        facts = _Facts()
        waiting, followed = list(schemas), set[str]()
        while waiting:
            schema = waiting.pop()
            if schema is False:
                facts.is_impossible = True
            if not isinstance(schema, dict):
                continue
            facts.all_of.append({key: schema[key] for key in schema.keys() - _TAKEN_APART})
            waiting += schema.get("allOf", [])
            if "anyOf" in schema:
                facts.any_of.append(schema["anyOf"])
            reference = schema.get("$ref")
            if reference is not None and reference not in followed:
                followed.add(reference)
                waiting.append(self._definitions.get(reference.rpartition("/")[2], True))
            if "const" in schema:
                waiting += _described(schema["const"])
            elif "enum" in schema:
                facts.any_of.append([{"const": value} for value in schema["enum"]])
        return facts

    def _differ(self, kind: str, facts: _Facts, others: _Facts, depth: int = 0) -> bool:
        """Whether it is certain that no value of this type is valid under both."""
        match kind:
            case "null":
                return False
            case "boolean":
                constants = [_constants(each) for each in (facts, others)]
                return all(constants) and constants[0] != constants[1]
            case "number":
                bounds = [_interval(each, "minimum", "maximum") for each in (facts, others)]
                return _are_apart(*bounds)
            case "string":
                constants = [_constants(each) for each in (facts, others)]
                if all(constants):
                    return constants[0] != constants[1]
                sizes = [_interval(each, "minLength", "maxLength") for each in (facts, others)]
                return _are_apart(*sizes)
            case "array":
                return self._arrays_differ(facts, others, depth)
            case _:
                return self._objects_differ(facts, others, depth)

    def _arrays_differ(self, facts: _Facts, others: _Facts, depth: int) -> bool:
        one, other = (_interval(each, "minItems", "maxItems") for each in (facts, others))
        if _are_apart(one, other):
            return True
        # A value that is valid under both has at least this many items.
        num_shared = int(min(_MAX_ITEMS, max(0, one.low, other.low)))
        return any(
            self._are_disjoint(_item(facts, i), _item(others, i), depth + 1)
            for i in range(num_shared)
        )

    def _objects_differ(self, facts: _Facts, others: _Facts, depth: int) -> bool:
        # A value that is valid under both has all of these names.
        return any(
            self._are_disjoint(_property(facts, name), _property(others, name), depth + 1)
            for name in {**_required(facts), **_required(others)}
        )


@dataclass(frozen=True, slots=True)
class _Interval:
    low: float
    high: float


def _are_distinct_constants(branches: Sequence[Schema]) -> bool:
    """Whether each branch is a different text, as when each value has a title."""
    texts = [each.get("const") if isinstance(each, dict) else None for each in branches]
    are_texts = all(isinstance(text, str) for text in texts)
    return are_texts and len(set(texts)) == len(texts)


def _choices(any_of: Sequence[list[Schema]]) -> list[Schema]:
    return [{"anyOf": options} for options in any_of]


def _are_apart(one: _Interval, other: _Interval) -> bool:
    return one.high < other.low or other.high < one.low


def _described(value: Any) -> list[Schema]:
    """Other schemas that hold for a constant."""
    match value:
        case bool() | None:
            return []
        case int() | float():
            return [{"minimum": value, "maximum": value}]
        case str():
            return [{"minLength": len(value), "maxLength": len(value)}]
        case list():
            items = [{"const": each} for each in value]
            return [{"prefixItems": items, "minItems": len(items), "maxItems": len(items)}]
        case _:
            properties = {name: {"const": each} for name, each in value.items()}
            return [
                {
                    "properties": properties,
                    "required": list(properties),
                    "additionalProperties": False,
                }
            ]


def _kinds(*facts: _Facts) -> frozenset[str]:
    """The types that all of them allow."""
    kinds = _TYPES
    for schema in (each for one in facts for each in one.all_of):
        if "type" in schema:
            named = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
            kinds &= {"number" if name == "integer" else name for name in named}
        if "const" in schema:
            kinds &= {_kind(schema["const"])}
    return kinds


def _kind(value: Any) -> str:
    kind = json_type(value)
    return "number" if kind == "integer" else kind


def _constants(facts: _Facts) -> list[Any]:
    return [each["const"] for each in facts.all_of if "const" in each][:1]


def _interval(facts: _Facts, low: str, high: str) -> _Interval:
    """The interval of a number or a count; it includes its bounds."""
    lows = [each[low] for each in facts.all_of if low in each]
    highs = [each[high] for each in facts.all_of if high in each]
    return _Interval(max(lows, default=-math.inf), min(highs, default=math.inf))


def _item(facts: _Facts, place: int) -> list[Schema]:
    """The schemas that hold for one item."""
    found = []
    for schema in facts.all_of:
        first = schema.get("prefixItems", [])
        found.append(first[place] if place < len(first) else schema.get("items", True))
    return found


def _required(facts: _Facts) -> dict[str, None]:
    return dict.fromkeys(name for each in facts.all_of for name in each.get("required", []))


def _property(facts: _Facts, name: str) -> list[Schema]:
    """The schemas that hold for the value of a name."""
    found = []
    for schema in facts.all_of:
        properties = schema.get("properties", {})
        if name in properties:
            found.append(properties[name])
        elif "patternProperties" not in schema:  # they may or may not apply to the name
            found.append(schema.get("additionalProperties", True))
    return found
