"""Fifty JSON schemas as people write them, each of which bounds how long an answer can be."""

from typing import Any

Schema = dict[str, Any]


def _object(required: list[str] | None = None, **properties: Any) -> Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 8}
FEW = {"type": "integer", "minimum": 0, "maximum": 99}
COLOUR = {"enum": ["red", "green", "blue"]}
POINT = _object(x=FEW, y=FEW)

SCHEMAS: dict[str, Schema] = {
    "a word": WORD,
    "a number": {"type": "number", "minimum": -1, "maximum": 1},
    "an integer": FEW,
    "an integer under nothing": {"type": "integer", "exclusiveMaximum": 0, "minimum": -50},
    "true or false": {"type": "boolean"},
    "null": {"type": "null"},
    "a constant": {"const": {"a": [1, "two", None]}},
    "an enumeration": COLOUR,
    "an enumeration of kinds": {"enum": [1, "one", None, True, [1]]},
    "several types": {"type": ["integer", "null"], "minimum": 0, "maximum": 999},
    "a pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
    "a pattern within": {"type": "string", "pattern": "^a.{0,3}z$"},
    "lengths": {"type": "string", "minLength": 3, "maxLength": 6},
    "a date": {"type": "string", "format": "date"},
    "a time": {"type": "string", "format": "time"},
    "a date and time": {"type": "string", "format": "date-time"},
    "an address of mail": _object(mail={"type": "string", "format": "email", "maxLength": 24}),
    "a uuid": {"type": "string", "format": "uuid"},
    "an address of the net": {"type": "string", "format": "ipv4"},
    "an object": _object(name=WORD, age=FEW),
    "an object with something optional": _object(
        ["name"], name=WORD, age=FEW, tall={"type": "boolean"}
    ),
    "nothing required": _object([], a=FEW, b=COLOUR),
    "an object within": _object(id=FEW, place=POINT),
    "three levels": _object(a=_object(b=_object(c=COLOUR))),
    "an empty object": _object(),
    "a list": {"type": "array", "items": FEW, "maxItems": 4},
    "a list of some length": {"type": "array", "items": COLOUR, "minItems": 2, "maxItems": 3},
    "a list of objects": {"type": "array", "items": POINT, "minItems": 1, "maxItems": 2},
    "lists of lists": {
        "type": "array",
        "items": {"type": "array", "items": FEW, "maxItems": 2},
        "maxItems": 2,
    },
    "a tuple": {"type": "array", "prefixItems": [FEW, COLOUR, WORD], "items": False, "minItems": 3},
    "a tuple with a tail": {
        "type": "array",
        "prefixItems": [WORD],
        "items": FEW,
        "minItems": 1,
        "maxItems": 3,
    },
    "either": {"anyOf": [FEW, COLOUR]},
    "either object": {
        "anyOf": [_object(circle=FEW), _object(square=FEW, turned={"type": "boolean"})]
    },
    "one of": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}]},
    "all of": {
        "allOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 12}],
    },
    "all of an object": {
        "allOf": [
            {"type": "object", "properties": {"a": FEW}, "required": ["a"]},
            {"type": "object", "properties": {"b": COLOUR}, "required": ["b"]},
        ],
        "properties": {"a": True, "b": True},
        "additionalProperties": False,
    },
    "a definition": {
        "$defs": {"point": POINT},
        **_object(start={"$ref": "#/$defs/point"}, end={"$ref": "#/$defs/point"}),
    },
    "definitions, the old way": {
        "definitions": {"colour": COLOUR},
        **_object(front={"$ref": "#/definitions/colour"}, back={"$ref": "#/definitions/colour"}),
    },
    "a tree": {
        "$defs": {
            "leaf": _object(value=FEW),
            "tree": _object(
                left={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
                right={"anyOf": [{"$ref": "#/$defs/leaf"}, {"type": "null"}]},
            ),
        },
        "$ref": "#/$defs/tree",
    },
    "a multiple": {"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 50},
    "an optional value": _object(note={"anyOf": [WORD, {"type": "null"}]}),
    "a discriminated kind": {
        "anyOf": [
            _object(kind={"const": "point"}, x=FEW),
            _object(kind={"const": "name"}, text=WORD),
        ]
    },
    "names with signs": _object(
        **{"a b": FEW, 'quo"te': FEW, "ümlaut": COLOUR, "back\\slash": FEW}
    ),
    "an enumeration with signs": {"enum": ['a "quote"', "tab\there", "naïve", "日本"]},
    "a score with a reason": _object(
        score={"type": "number", "minimum": 0, "maximum": 10},
        reason={"type": "string", "maxLength": 12},
    ),
    "a weather report": _object(
        place=WORD,
        celsius={"type": "integer", "minimum": -40, "maximum": 50},
        sky={"enum": ["clear", "cloudy", "rain", "snow"]},
        wind=_object(speed=FEW, direction={"enum": ["N", "E", "S", "W"]}),
    ),
    "a call": _object(
        name={"const": "search"},
        arguments=_object(
            ["query"], query=WORD, limit={"type": "integer", "minimum": 1, "maximum": 9}
        ),
    ),
    "a title and a description": {
        "title": "Thing",
        "description": "What it is.",
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **_object(
            thing={"type": "string", "maxLength": 5, "description": "Its name.", "default": "x"}
        ),
    },
    "other names": {
        "type": "object",
        "properties": {"a": FEW},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 2,
    },
    "a person": _object(
        ["name", "born"],
        name=_object(first=WORD, last=WORD),
        born={"type": "string", "format": "date"},
        tags={"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
        partner={"type": ["string", "null"], "maxLength": 4},
    ),
}
