"""JSON schemas mean what the standard says; what cannot be held to is refused, and says why."""

import json
import time
from typing import Any

import pytest
from forms import admits, is_valid, state_of

from localllm.answer.grammar_compiler import check_grammar
from localllm.errors import RequestError
from localllm.grammars.schema import read_schema_of_tool
from localllm.text.grammar import LOOSE, MAX_SCHEMA_OBJECTS, Grammar


def open_object(**schema: Any) -> dict[str, Any]:
    return {"type": "object", **schema}


VALID: dict[str, tuple[Any, list[Any], list[Any]]] = {
    # What asks for nothing is accepted.
    "items that may be alike": ({"type": "array", "uniqueItems": False}, [[1, 1]], ["a"]),
    "at most one item": (
        {"type": "array", "uniqueItems": True, "maxItems": 1},
        [[], [1]],
        [[1, 1]],
    ),
    "a format that is an annotation": (
        {"type": "string", "format": "binary"},
        ["anything"],
        [1],
    ),
    "an address of the world": ({"type": "string", "format": "iri"}, ["ä:ö"], [1]),
    "a format of an expression": ({"type": "string", "format": "regex"}, ["("], [1]),
    "a format that nobody knows": ({"type": "string", "format": "phone"}, ["1"], [1]),
    "keywords that nobody knows": (
        {"type": "integer", "nullable": True, "x-order": 1, "x-guidance": {"lenient": True}},
        [1],
        ["a"],
    ),
    "keywords that ask for nothing": (
        {"type": "integer", "not": False, "then": {}, "propertyNames": True},
        [1],
        ["a"],
    ),
    "annotations": (
        {"type": "integer", "title": "t", "description": "\ud800", "default": "x", "$comment": ""},
        [1],
        ["x"],
    ),
    # Names and references.
    "a name in other letters": (
        open_object(properties={"a": {"type": "integer"}}, additionalProperties={"type": "string"}),
        [{"a": 1}, {"a": 1, "b": "x"}],
        [{"a": "x"}, {"b": 1}],
    ),
    "a pointer": (
        open_object(
            properties={"a/b~c d": {"type": "integer"}, "e": {"$ref": "#/properties/a~1b~0c%20d"}},
            required=["e"],
        ),
        [{"e": 1}],
        [{"e": "x"}],
    ),
    "an anchor": (
        {"$defs": {"x": {"$anchor": "here", "type": "null"}}, "$ref": "#here"},
        [None],
        [1],
    ),
    "a document within": (
        {
            "$id": "https://example.com/root",
            "$defs": {"x": {"$id": "x", "$defs": {"y": {"type": "null"}}, "$ref": "#/$defs/y"}},
            "$ref": "/x",
        },
        [None],
        [1],
    ),
    "a name of a document": (
        {"$id": "urn:a", "$defs": {"x": {"type": "null"}}, "items": {"$ref": "urn:a#/$defs/x"}}
        | {"type": "array"},
        [[None]],
        [[1]],
    ),
    "itself": (
        open_object(properties={"a": {"$ref": "#"}}, additionalProperties=False),
        [{}, {"a": {"a": {}}}],
        [{"a": 1}],
    ),
    "a reference to a place beside names": (
        {"properties": {"$ref": {"type": "integer"}}, "type": "object"},
        [{"$ref": 1}],
        [{"$ref": "#"}],
    ),
    # Earlier drafts.
    "a list of items": (
        {"type": "array", "items": [{"type": "integer"}], "additionalItems": False},
        [[], [1]],
        [["a"], [1, 2]],
    ),
    "items beside an older keyword": (
        {"type": "array", "prefixItems": [{"type": "integer"}], "additionalItems": False},
        [[1, 2]],
        [["a"]],
    ),
    "an exclusive bound that is true": (
        {"type": "integer", "minimum": 1, "exclusiveMinimum": True, "maximum": 3}
        | {"exclusiveMaximum": False},
        [2, 3],
        [1, 4],
    ),
    # Numbers.
    "more than 0 and little": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.05},
        [0.05, 0.001],
        [0, 0.06],
    ),
    "less than 0 and little": (
        {"type": "number", "minimum": -9.5, "exclusiveMaximum": -9},
        [-9.5, -9.001],
        [-9, -9.6],
    ),
    "bounds of 64 bits": (
        {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1},
        [0, (1 << 53) - 1, 1 - (1 << 53)],
        [1 << 64],
    ),
    "a bound between two doubles": (
        {"type": "number", "minimum": 0.1, "maximum": 0.2},
        [0.1, 0.15, 0.2],
        [0.09, 0.21],
    ),
    "constants": ({"enum": [1.0, 1e22, -0.001, 1e-7]}, [1, 10**22, -0.001], [2]),
    "counts that are written as fractions": ({"type": "string", "maxLength": 2.0}, ["ab"], ["abc"]),
    "a bound that no answer meets": ({"type": "array", "maxItems": 10**30}, [[1]], [1]),
    "multiples of powers of ten": ({"type": "integer", "multipleOf": 10**6}, [10**6, 0], [10**5]),
    "multiples with decimals": ({"type": "number", "multipleOf": 0.05}, [0.15, 1], [0.12]),
    # Texts.
    "signs of all kinds": (
        {"enum": ['a"\\\n\t\x01\x7f', "😀", "<|im_end|>"]},
        ['a"\\\n\t\x01', "😀", "<|im_end|>"][1:],
        ["x"],
    ),
    "pattern and format": (
        {"type": "string", "pattern": "^2", "format": "date"},
        ["2024-02-29"],
        ["1999-01-01", "2"],
    ),
    "years that leap": (
        {"type": "string", "format": "date"},
        ["2024-02-29", "2000-02-29", "2023-02-28", "0004-02-29"],
        ["2023-02-29", "1900-02-29", "0000-01-01", "2024-04-31", "2024-13-01"],
    ),
    "times": (
        {"type": "string", "format": "date-time"},
        ["2024-02-29T23:59:59.5Z", "2024-01-01T00:00:00+05:30"],
        ["2023-02-29T00:00:00Z", "2024-01-01T00:00:60Z", "2024-01-01"],
    ),
    "nothing but true": (True, [1, "a"], []),
}


@pytest.mark.parametrize("name", sorted(VALID))
def test_a_schema_means_what_the_standard_says(name: str) -> None:
    schema, valid, invalid = VALID[name]
    for value in valid:
        assert is_valid(schema, value), value
    for value in invalid:
        assert not is_valid(schema, value), value


def test_a_name_is_written_in_one_way_only() -> None:
    schema = Grammar.of_schema(VALID["a name in other letters"][0])
    assert not admits(schema, '{"\\u0061":"x"}')
    by_pattern = Grammar.of_schema(open_object(patternProperties={"^a": {"type": "string"}}))
    assert not admits(by_pattern, '{"\\u0061b":1}')
    # Where a constant needs such letters no other names can be let in.
    both = open_object(properties={"a": {"const": "\x01"}})
    with pytest.raises(RequestError, match="control characters"):
        check_grammar(Grammar.of_schema(both))
    closed = Grammar.of_schema({**both, "additionalProperties": False})
    assert admits(closed, '{"a":"\\u0001"}')


OUT_OF_REACH: dict[str, tuple[Any, str, str]] = {
    "not": ({"items": {"not": {"type": "null"}}}, "the keyword 'not' is not supported", "#/items"),
    "if": ({"if": True, "then": {"type": "null"}}, "the keyword 'if' is not supported", ""),
    "items that differ": ({"uniqueItems": True}, "the keyword 'uniqueItems' is not supported", ""),
    "contains": ({"contains": {}}, "the keyword 'contains' is not supported", ""),
    "names": (
        {"propertyNames": {"maxLength": 3}},
        "the keyword 'propertyNames' is not supported",
        "",
    ),
    "dependencies": (
        {"dependentRequired": {"a": ["b"]}},
        "the keyword 'dependentRequired' is not supported",
        "",
    ),
    "what is left over": (
        {"unevaluatedProperties": False},
        "the keyword 'unevaluatedProperties' is not supported",
        "",
    ),
    "a dynamic reference": (
        {"$dynamicRef": "#x"},
        "the keyword '$dynamicRef' is not supported",
        "",
    ),
    "two other names": (
        open_object(minProperties=2),
        "minProperties may exceed the required names by at most one",
        "",
    ),
    "a type": (
        {"properties": {"a": {"type": "thing"}}},
        "'thing' is not a type",
        "#/properties/a",
    ),
    "no type": ({"type": []}, "[] is not a type", ""),
    "elsewhere": ({"$ref": "http://127.0.0.1:9/x"}, "$ref points outside the schema", ""),
    "nowhere": ({"$ref": "#/$defs/x"}, "$ref points to nothing", ""),
    "no schema": ({"items": 3}, "a schema must be an object, true or false", "#/items"),
    "no list": ({"anyOf": {}}, "anyOf must be a list of schemas", ""),
    "no bound": ({"minimum": "3"}, "minimum must be a number", ""),
    "no count": ({"minLength": -1}, "minLength must be a whole number of at least 0", ""),
    "half a pair": ({"const": "\ud800"}, "a lone surrogate", ""),
    "beyond doubles": ({"const": (1 << 53) + 1}, "cannot be written exactly", ""),
    "without end": ({"const": 10**400}, "cannot be written exactly", ""),
    "a bound beyond doubles": ({"minimum": 1 << 54}, "a bound beyond 2^53", ""),
    "an empty range": ({"type": "integer", "minimum": 3, "maximum": 2}, "Unsatisfiable", ""),
    "patterns that meet": (
        open_object(patternProperties={"^a": {}, "b$": {"type": "null"}}),
        "two of patternProperties may apply to the same name",
        "",
    ),
    "a pattern that no date has": (
        {"type": "string", "pattern": "^a", "format": "date"},
        "no text has this pattern, format and length",
        "",
    ),
    "a multiple of 0": ({"multipleOf": 0}, "multipleOf must be above 0", ""),
    "a large multiple": (
        {"type": "integer", "multipleOf": 215656441},
        "multipleOf is too large (215656441)",
        "",
    ),
    "multiples that meet": (
        {"allOf": [{"type": "integer", "multipleOf": n} for n in (97, 101, 103)]},
        "multipleOf is too large (101, 103, 97)",
        "",
    ),
    "a small multiple": ({"type": "number", "multipleOf": 1e-12}, "more than 9 decimals", ""),
    "a long constant": (
        {"const": "ab" * 100_000},
        "it requires a text of 200,000 bytes; at most 32,768 are allowed",
        "",
    ),
    "a long name": (
        open_object(properties={"é" * 20_000: {}}),
        "it requires a text of 40,000 bytes",
        "",
    ),
    "repetitions of repetitions": (
        {"items": {"pattern": "(a{900}){1000}"}},
        "it requires a text of 900,000 bytes",
        "#/items",
    ),
    "lists of lists": (
        {"type": "array", "minItems": 900, "items": {"type": "array", "minItems": 900}},
        "it requires a text of 811,802 bytes",
        "",
    ),
    "texts in a list": (
        {"type": "array", "minItems": 300, "items": {"type": "string", "minLength": 300}},
        "it requires a text of 90,602 bytes",
        "",
    ),
}


@pytest.mark.parametrize("name", sorted(OUT_OF_REACH))
def test_what_cannot_be_held_to_is_refused_at_once(name: str) -> None:
    schema, reason, where = OUT_OF_REACH[name]
    began = time.process_time()
    with pytest.raises(RequestError) as found:
        check_grammar(Grammar.of_schema(schema))
    assert time.process_time() - began < 0.2
    assert "the JSON schema cannot be used: " in found.value.message
    assert reason in found.value.message
    assert found.value.where == where
    assert found.value.param == "grammar"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"k{i}": True for i in range(12_000)}},
        {"properties": {f"k{i}": True for i in range(MAX_SCHEMA_OBJECTS // 2)}},
        {"required": [f"k{i}" for i in range(12_000)]},
        {"enum": list(range(12_000))},
        {"anyOf": [True] * 12_000},
        {"const": [[]] * 12_000},
        {"default": [[]] * 1_000_000},
    ],
)
def test_everything_in_a_schema_is_counted_before_it_is_read(schema: Any) -> None:
    began = time.process_time()
    with pytest.raises(RequestError, match="too large"):
        Grammar.of_schema(schema)
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "multipleOf": 9973},
        {"const": "ab " * 10_000},
        {"type": "string", "pattern": "^(a{180}){180}$"},
        {"type": "array", "maxItems": 1000, "items": {"type": "string", "maxLength": 10**6}},
    ],
)
def test_what_is_just_small_enough_says_soon_what_may_come_first(schema: Any) -> None:
    began = time.process_time()
    state = state_of(Grammar.of_schema(schema))
    state.compute_bitmask()
    assert not state.is_error()
    assert time.process_time() - began < 0.3


def test_an_object_may_have_many_names_that_may_be_left_out() -> None:
    names = [f"k{i}" for i in range(1500)]
    schema = open_object(properties={name: {"type": "null"} for name in names})
    assert is_valid(schema, {names[0]: None, names[-1]: None})


def of_tool(schema: dict[str, Any]) -> Grammar:
    """The grammar of a call that is nothing but its arguments."""
    return Grammar("calls", f"start: %json {json.dumps({**schema, LOOSE: True})}")


@pytest.mark.parametrize("name", sorted(OUT_OF_REACH))
def test_what_is_out_of_reach_is_left_out_of_a_tools_schema(name: str) -> None:
    schema, _, _ = OUT_OF_REACH[name]
    if isinstance(schema, dict):
        read_schema_of_tool({**schema, LOOSE: True})


def test_the_rest_of_a_tools_schema_is_held() -> None:
    schema = open_object(
        properties={
            "a": {"type": "integer", "not": {"const": 3}},
            "b": {"type": "array", "uniqueItems": True, "items": {"type": "boolean"}},
            "c": {"oneOf": [{"type": "integer", "minimum": 3}, {"type": "number"}]},
            "d": {"type": "string", "pattern": "(?=x)", "maxLength": 2},
        },
        required=["a"],
        dependentRequired={"b": ["c"]},
        additionalProperties=False,
    )
    with pytest.raises(RequestError):
        check_grammar(Grammar.of_schema(schema))
    tool = of_tool(schema)
    for text in ('{"a":3}', '{"a":1,"b":[true,true]}', '{"a":1,"c":1.5}', '{"a":1,"d":"yy"}'):
        assert admits(tool, text), text
    for text in ("{}", '{"a":"x"}', '{"a":1,"b":[1]}', '{"a":1,"c":"x"}', '{"a":1,"e":1}'):
        assert not admits(tool, text), text
    # Only a grammar of calls can ask for that.
    with pytest.raises(RequestError):
        check_grammar(Grammar.of_schema({**schema, LOOSE: True}))


def test_names_that_are_strings_ask_for_nothing() -> None:
    record = open_object(propertyNames={"type": "string"}, additionalProperties={"type": "null"})
    assert admits(Grammar.of_schema(record), '{"a":null}')
