"""Rewrites standard JSON schemas in the subset that llguidance implements exactly.

Unknown keywords and annotations are left out; keywords that cannot be enforced are refused; and
where llguidance gives something another meaning, the schema is rewritten:

- patterns are in Rust's syntax (pattern.py), dates respect leap years (formats.py);
- bounds are doubles that are no wider than what was asked for. Values beyond 2^53, where doubles
  are not exact, are cut off, as are values within 1e-9 of an excluded bound;
- names are written in one way only: `"\\u0061"` would be another way to write the name "a";
- references point to `$defs` under names of their own (references.py), and `oneOf` becomes `anyOf`
  (one_of.py).

Source: JSON Schema 2020-12, core, sections 8 to 11, and validation, sections 6 to 9; llguidance
1.9, parser/src/json (MIT).
"""

import json
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from localllm.errors import RequestError
from localllm.grammars.bounds import check_multiples, check_shortest
from localllm.grammars.formats import KNOWN, PATTERNS
from localllm.grammars.lengths import check_length, regex_length
from localllm.grammars.one_of import settle_one_of
from localllm.grammars.pattern import rust_regex
from localllm.grammars.references import Place, References
from localllm.text.grammar import COMPACT, JSON_SPACE, LOOSE, check_schema_size, refused

Written = dict[str, Any]

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Beyond this, not every whole number is a double. Source: RFC 8259, section 6.
_MAX_NUMBER = (1 << 53) - 1
_NEAREST = 1e-9
# No answer has this many of anything.
_MANY = 1 << 24
_SHORT_ESCAPES = "\b\t\n\f\r"


def read_schema(schema: Any) -> Written:
    """`schema` rewritten for llguidance, with its options, for JSON within other text.

    Raises: RequestError for an invalid schema, or one that cannot be enforced.
    """
    return _read_schema(schema, is_loose=False)


def read_compact_schema(schema: Any) -> Written:
    """The same, for JSON without spaces."""
    return _compact(_read_schema(schema, is_loose=False))


def read_schema_of_tool(schema: Any) -> Written:
    """The same for the arguments of a tool; with the keyword `LOOSE`, what cannot be enforced is
    left out.

    Raises: RequestError.
    """
    if isinstance(schema, dict) and COMPACT in schema:
        return read_compact_schema({k: v for k, v in schema.items() if k != COMPACT})
    if not isinstance(schema, dict) or LOOSE not in schema:
        return _read_schema(schema, is_loose=False)
    try:
        return _read_schema(schema, is_loose=True)
    except RequestError:
        # Too much of it to say which part.
        kind = schema.get("type")
        return _read_schema({"type": kind} if kind in TYPES else True, is_loose=False)


def _read_schema(schema: Any, *, is_loose: bool) -> Written:
    check_schema_size(schema)
    reader = _Reader(schema, is_loose=is_loose)
    written = settle_one_of(reader.whole())
    check_multiples(reader.multiples)
    check_shortest(written)
    if reader.has_controls and reader.has_open_names:
        raise refused(
            "JSON schema",
            "a constant with control characters cannot be combined with an object that may have "
            "other names than those listed",
        )
    try:
        json.dumps(written, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise refused("JSON schema", "a lone surrogate, which no text can hold") from error
    escapes = 'nrbtf\\"u' if reader.has_controls else 'nrbtf\\"'
    options = {"whitespace_pattern": JSON_SPACE, "json_allowed_escapes": escapes}
    return {**written, "x-guidance": options}


def _compact(written: Written) -> Written:
    options = {k: v for k, v in written["x-guidance"].items() if k != "whitespace_pattern"}
    return {**written, "x-guidance": {**options, "whitespace_flexible": False}}


class _Reader:
    """Reads one document. `multiples` are all of its multipleOf; `has_controls`: constants hold
    characters that only `\\u` can write; `has_open_names`: an object may have names that are not
    listed. If it `is_loose`, keywords that cannot be enforced are left out.
    """

    def __init__(self, schema: Any, *, is_loose: bool) -> None:
        self._is_loose = is_loose
        self.multiples: list[Fraction] = []
        self.has_controls = self.has_open_names = False
        self._references = References(schema)
        self._names: dict[int, str] = {}
        self._waiting: list[Place] = []
        self._keywords = _by_keyword(
            {
                self._read_type: "type",
                self._read_constants: "enum const",
                self._read_number: "multipleOf minimum maximum exclusiveMinimum exclusiveMaximum",
                self._read_string: "minLength maxLength pattern format",
                self._read_array: "items prefixItems additionalItems minItems maxItems",
                self._read_object: "properties patternProperties additionalProperties required "
                "minProperties maxProperties",
                self._read_combined: "allOf anyOf oneOf",
                self._read_reference: "$ref",
            }
        )

    def whole(self) -> Written:
        """The whole document, rewritten."""
        written = self._read(self._references.root)
        if not isinstance(written, dict):
            written = {} if written else {"enum": []}
        definitions = {}
        while self._waiting:
            place = self._waiting.pop()
            definitions[self._names[id(place.schema)]] = self._read(place)
        return {**written, "$defs": definitions}

    def _read(self, place: Place) -> Written | bool:
        schema = place.schema
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            raise _refused("a schema must be an object, true or false", place)
        written: Written = {}
        done = set[Callable[[Place, Written], None]]()
        for keyword in schema:
            if _is_out_of_reach(keyword, schema):
                if self._is_loose:
                    continue
                raise _refused(f"the keyword {keyword!r} is not supported", place)
            read = self._keywords.get(keyword)
            if read is None or read in done:
                continue
            done.add(read)
            before = dict(written)
            try:
                read(place, written)
            except RequestError:
                if not self._is_loose:
                    raise
                written = before
        return written

    def _read_all(self, place: Place, keyword: str) -> list[Written | bool]:
        schemas = place.schema[keyword]
        if not isinstance(schemas, list) or not schemas:
            raise _refused(f"{keyword} must be a list of schemas", place)
        return [self._read(place.at(keyword, i)) for i in range(len(schemas))]

    def _read_map(self, place: Place, keyword: str) -> dict[str, Written | bool]:
        schemas = place.schema.get(keyword, {})
        if not isinstance(schemas, dict):
            raise _refused(f"{keyword} must be an object of schemas", place)
        return {name: self._read(place.at(keyword, name)) for name in schemas}

    def _read_type(self, place: Place, written: Written) -> None:
        given = place.schema["type"]
        named = given if isinstance(given, list) else [given]
        unknown = [name for name in named if name not in TYPES]
        if unknown or not named:
            raise _refused(f"{unknown[0] if unknown else named!r:.50} is not a type", place)
        written["type"] = given if isinstance(given, str) else list(dict.fromkeys(named))

    def _read_constants(self, place: Place, written: Written) -> None:
        for keyword in ("enum", "const"):
            if keyword not in place.schema:
                continue
            value = written[keyword] = place.schema[keyword]
            if keyword == "enum" and not isinstance(value, list):
                raise _refused("enum must be a list", place)
            self._check_constant(value, place)

    def _check_constant(self, value: Any, place: Place) -> None:
        match value:
            case str():
                check_length(len(value.encode(errors="replace")), "JSON schema", place.where)
                self.has_controls |= any(
                    (char < " " or char == "\x7f") and char not in _SHORT_ESCAPES for char in value
                )
            case int() | float():
                is_whole = isinstance(value, int)
                if not _is_finite(value) or (is_whole and int(float(value)) != value):
                    raise _refused(f"the number {value!r:.50} cannot be written exactly", place)
            case list():
                for each in value:
                    self._check_constant(each, place)
            case dict():
                for name, each in value.items():
                    check_length(len(name.encode(errors="replace")), "JSON schema", place.where)
                    self._check_constant(each, place)

    def _read_number(self, place: Place, written: Written) -> None:
        schema = place.schema
        lows = [(_number(place, "minimum"), False)] if "minimum" in schema else []
        highs = [(_number(place, "maximum"), False)] if "maximum" in schema else []
        for keyword, bounds in (("exclusiveMinimum", lows), ("exclusiveMaximum", highs)):
            if schema.get(keyword) is True and bounds:  # of draft 4
                bounds[0] = (bounds[0][0], True)
            elif not isinstance(schema.get(keyword), bool | None):
                bounds.append((_number(place, keyword), True))
        for bound, is_open in lows:
            low = _lower_bound(bound, is_open=is_open, place=place)
            written["minimum"] = max(low, written.get("minimum", low))
        for bound, is_open in highs:
            high = -_lower_bound(-bound, is_open=is_open, place=place)
            written["maximum"] = min(high, written.get("maximum", high))
        if "multipleOf" in schema:
            multiple = _number(place, "multipleOf")
            if not 0 < multiple < 1 << 32:
                raise _refused("multipleOf must be above 0 and below 2^32", place)
            self.multiples.append(Fraction(repr(multiple)))
            written["multipleOf"] = multiple

    def _read_string(self, place: Place, written: Written) -> None:
        _read_counts(place, written, "minLength", "maxLength")
        schema, patterns = place.schema, []
        for keyword in ("pattern", "format"):
            if not isinstance(schema.get(keyword, ""), str):
                raise _refused(f"{keyword} must be a text", place)
        if "pattern" in schema:
            patterns.append(_pattern(schema["pattern"], place))
        asked = schema.get("format")
        if asked in PATTERNS:
            patterns.append(PATTERNS[asked])
        elif asked in KNOWN:
            written["format"] = asked
        if patterns:
            written["pattern"] = patterns[0]
        if patterns[1:]:
            written.setdefault("allOf", []).append({"pattern": patterns[1]})

    def _read_array(self, place: Place, written: Written) -> None:
        _read_counts(place, written, "minItems", "maxItems")
        schema = place.schema
        first, rest = "prefixItems", "items"
        if isinstance(schema.get("items"), list):  # of drafts before 2020-12
            first, rest = "items", "additionalItems"
        if schema.get(first):
            written["prefixItems"] = self._read_all(place, first)
        if rest in schema:
            written["items"] = self._read(place.at(rest))

    def _read_object(self, place: Place, written: Written) -> None:
        schema = place.schema
        _read_counts(place, written, "minProperties", "maxProperties")
        properties = self._read_map(place, "properties")
        by_pattern = dict[str, Any]()
        for pattern, value in self._read_map(place, "patternProperties").items():
            name = _pattern(pattern, place)
            by_pattern[name] = {"allOf": [by_pattern[name], value]} if name in by_pattern else value
        required = schema.get("required", [])
        if not isinstance(required, list) or not all(isinstance(each, str) for each in required):
            raise _refused("required must be a list of names", place)
        for name in (*properties, *required):
            check_length(len(name.encode(errors="replace")), "JSON schema", place.where)
        names = dict.fromkeys(required)
        if written.get("minProperties", 0) > len(names) + 1:
            # Names that are not listed may occur twice.
            raise _refused("minProperties may exceed the required names by at most one", place)
        read = {"properties": properties, "patternProperties": by_pattern, "required": [*names]}
        written.update({keyword: value for keyword, value in read.items() if value})
        if "additionalProperties" in schema:
            written["additionalProperties"] = self._read(place.at("additionalProperties"))
        is_open = bool(by_pattern) or written.get("additionalProperties") is not False
        self.has_open_names |= is_open and bool(properties or by_pattern)

    def _read_combined(self, place: Place, written: Written) -> None:
        for keyword in place.schema:
            if keyword not in ("allOf", "anyOf", "oneOf"):
                continue
            schemas = self._read_all(place, keyword)
            if keyword == "oneOf" and self._is_loose:  # one of them at least
                keyword, schemas = "allOf", [{"anyOf": schemas}]
            written[keyword] = [*written.get(keyword, []), *schemas]

    def _read_reference(self, place: Place, written: Written) -> None:
        target = self._references.find(place)
        if isinstance(target.schema, dict):
            key = id(target.schema)
            if key not in self._names:
                self._names[key] = str(len(self._names))
                self._waiting.append(target)
            written["$ref"] = f"#/$defs/{self._names[key]}"
        elif self._read(target) is False:
            written["enum"] = []


def _by_keyword(
    reads: dict[Callable[[Place, Written], None], str],
) -> dict[str, Callable[[Place, Written], None]]:
    return {keyword: read for read, keywords in reads.items() for keyword in keywords.split()}


def _is_out_of_reach(keyword: str, schema: dict[str, Any]) -> bool:
    """Whether a keyword asks for something that cannot be enforced."""
    value = schema[keyword]
    match keyword:
        case "uniqueItems":
            most = schema.get("maxItems")
            return value is not False and not (isinstance(most, int) and most <= 1)
        case "not":
            return value is not False
        case "if":
            return "then" in schema or "else" in schema
        case "propertyNames":
            return value not in (True, {}, {"type": "string"})  # names are strings
        case "unevaluatedItems" | "unevaluatedProperties":
            return value not in (True, {})
        case "dependentRequired" | "dependentSchemas" | "dependencies":
            return value not in ({},)
        case "contains" | "$dynamicRef" | "$recursiveRef":
            return True
        case _:
            return False


def _refused(reason: str, place: Place) -> Exception:
    return refused("JSON schema", reason, place.where)


def _pattern(pattern: str, place: Place) -> str:
    written = rust_regex(pattern)
    check_length(regex_length(written), "JSON schema", place.where)
    return written


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _number(place: Place, keyword: str) -> float:
    value = place.schema[keyword]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise _refused(f"{keyword} must be a number", place)
    return value


def _lower_bound(bound: float, *, is_open: bool, place: Place) -> float:
    """The smallest double that is at least `bound`, or above it if `is_open`.

    For an upper bound, negate both the argument and the result.
    """
    if bound > _MAX_NUMBER or (is_open and bound == _MAX_NUMBER):
        raise _refused("a bound beyond 2^53 cannot be enforced exactly", place)
    if bound <= -_MAX_NUMBER:
        return -_MAX_NUMBER
    low = float(bound)
    if low < bound:
        low = math.nextafter(low, math.inf)
    if not is_open or low > bound:
        return int(low) if low.is_integer() else low
    step = _NEAREST
    while (above := round(low + step, 9)) <= bound:
        step *= 10
    return above


def _read_counts(place: Place, written: Written, *keywords: str) -> None:
    """Read limits on the number of characters, items or names."""
    for keyword in keywords:
        if keyword not in place.schema:
            continue
        value = _number(place, keyword)
        if value < 0 or value % 1:
            raise _refused(f"{keyword} must be a whole number of at least 0", place)
        if keyword.startswith("min") or value < _MANY:
            written[keyword] = int(min(value, _MANY))
