"""`oneOf` is followed where its branches exclude each other, and made to where names tell."""

import time
from typing import Any

import pytest
from forms import is_valid, state_of

from localllm.errors import RequestError
from localllm.text.grammar import Grammar


def named(kind: str, **properties: Any) -> dict[str, Any]:
    return {"properties": {"kind": {"const": kind}, **properties}, "required": ["kind"]}


TOLD_APART: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "types": (
        {"oneOf": [{"type": "null"}, {"type": ["string", "integer"]}]},
        [None, "a", 1],
        [True],
    ),
    "ranges": (
        {"oneOf": [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 5}]},
        [3, 5],
        [4],
    ),
    "ranges that touch": (
        {
            "oneOf": [
                {"type": "number", "maximum": 3},
                {"type": "number", "exclusiveMinimum": 3, "maximum": 9},
            ]
        },
        [3, 3.5],
        [10],
    ),
    "lengths": (
        {"oneOf": [{"type": "string", "maxLength": 2}, {"type": "string", "minLength": 4}]},
        ["ab", "abcd"],
        ["abc"],
    ),
    "constants": (
        {"oneOf": [{"const": "a"}, {"enum": ["b", 1, {"a": 1}]}, {"const": {"a": 2}}]},
        ["b"],
        ["c"],
    ),
    "numbers of items": (
        {"oneOf": [{"type": "array", "maxItems": 1}, {"type": "array", "minItems": 2}]},
        [[], [1, 2]],
        ["a"],
    ),
    "items": (
        {
            "oneOf": [
                {"type": "array", "items": {"type": kind}, "minItems": 1}
                for kind in ("string", "integer")
            ]
        },
        [["a"], [1, 2]],
        [["a", 1], []],
    ),
    "a constant of an object": (
        {"type": "object", "oneOf": [named("a", x={"type": "integer"}), named("b")]},
        [{"kind": "a", "x": 1}, {"kind": "b"}],
        [{"kind": "c"}, {"kind": "a", "x": "b"}],
    ),
    "a constant by references": (
        {
            "$defs": {
                "a": {"type": "object", **named("a")},
                "b": {"allOf": [{"$ref": "#/$defs/c"}]},
            }
            | {"c": {"type": "object", **named("b")}},
            "oneOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}],
        },
        [{"kind": "a"}, {"kind": "b"}],
        [{"kind": "c"}],
    ),
    "a tree": (
        {
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"left": {"oneOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]}},
                    "required": ["left"],
                    "additionalProperties": False,
                }
            },
            "$ref": "#/$defs/tree",
        },
        [{"left": {"left": None}}],
        [{"left": {}}],
    ),
    "a name that another may not have": (
        {
            "oneOf": [
                {"type": "object", "required": ["a"]},
                {"type": "object", "properties": {"b": {}}, "additionalProperties": False},
            ]
        },
        [{"a": 1}, {"b": 1}, {}],
        [1],
    ),
    # Either name alone; with both, both branches would hold.
    "required names": (
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        [{"a": 1}, {"b": 1}],
        [{"a": 1, "b": 1}, {}],
    ),
    "one branch": ({"oneOf": [{"type": "integer"}]}, [1], ["a"]),
}


@pytest.mark.parametrize("name", sorted(TOLD_APART))
def test_branches_that_exclude_each_other_are_followed(name: str) -> None:
    schema, valid, invalid = TOLD_APART[name]
    assert all(is_valid(schema, value) for value in valid)
    assert not any(is_valid(schema, value) for value in invalid)


@pytest.mark.parametrize(
    "branches",
    [
        [{"minimum": 1}, {"type": "number"}],
        [{"type": "integer", "maximum": 3}, {"type": "integer", "minimum": 3}],
        [{"type": "string", "pattern": "^a"}, {"type": "string", "pattern": "^b"}],
        [{"required": ["a"]}, {"required": ["b"]}],  # also about what is no object
        [{"type": "object", "required": ["a"]}, {"type": "object", "required": ["a", "b"]}],
        [{"type": "object", "properties": {"a": {"const": n}}} for n in (1, 2)],
        [{"type": "array", "items": {"type": kind}} for kind in ("string", "integer")],
        [True, {"type": "null"}],
    ],
)
def test_branches_that_may_hold_at_once_are_refused(branches: list[Any]) -> None:
    with pytest.raises(RequestError, match="two branches of oneOf may hold at once") as found:
        state_of(Grammar.of_schema({"oneOf": branches}))
    assert found.value.where == "oneOf, branches 1 and 2"


def test_values_with_their_titles_are_followed_however_many_there_are() -> None:
    titled = [{"const": f"{i}", "title": f"The {i}th"} for i in range(1000)]
    assert is_valid({"oneOf": titled}, "999")


def test_telling_many_branches_apart_takes_little_time() -> None:
    names = [{"enum": [f"{i}-{n}" for n in range(60)]} for i in range(60)]
    began = time.process_time()
    with pytest.raises(RequestError, match="oneOf"):
        state_of(Grammar.of_schema({"oneOf": names}))
    assert time.process_time() - began < 1.0
