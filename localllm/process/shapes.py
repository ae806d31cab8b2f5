"""Writes values of a type as values that msgpack knows, and reads them back with checks.

A shape writes a column: many values at once, field by field. A step of an engine brings as many
events as there are requests, and a check of a column runs in C.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import StrEnum
from itertools import chain, compress, islice, repeat
from operator import attrgetter
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from localllm.errors import LocalLLMError
from localllm.process.failure import Failure
from localllm.process.limits import AtMost, Limit, Within

Column = Sequence[Any]
# An int is accepted for a float.
_TYPES: dict[type, Set[type]] = {
    bool: {bool},
    int: {int},
    float: {float, int},
    str: {str},
    bytes: {bytes},
}


class MessageError(ValueError):
    """What another process sent is not a valid message."""


class Shape:
    """Writes and reads columns of one type; `name` describes that type completely."""

    name: str

    def write(self, values: Column) -> Any:
        """What is passed to msgpack for these values."""
        raise NotImplementedError

    def read(self, raw: Any, count: int) -> Column:
        """The `count` values that were given to `write`. Raises: MessageError."""
        raise NotImplementedError


class _Plain(Shape):
    """Types that msgpack knows by itself."""

    def __init__(self, kind: type, limits: Sequence[Limit], *, is_optional: bool = False) -> None:
        self._types = _TYPES[kind] | {NoneType} if is_optional else _TYPES[kind]
        self._limits = limits
        self.name = f"{kind.__name__}{'?' * is_optional}{[*limits] or ''}"

    def write(self, values: Column) -> Any:
        return values

    def read(self, raw: Any, count: int) -> Column:
        values = _column(raw, count, self.name)
        if not self._types >= set(map(type, values)):
            raise MessageError(f"not {self.name:.200}")
        if self._limits:
            given = values if None not in values else [each for each in values if each is not None]
            if given and not all(_is_within(given, limit) for limit in self._limits):
                raise MessageError(f"not {self.name:.200}")
        return values


class _Choice(Shape):
    """One of the texts of a StrEnum or a Literal, or None if that is allowed."""

    def __init__(self, choices: Sequence[str], *, is_optional: bool = False) -> None:
        self._choices: dict[str | None, str | None] = {str(choice): choice for choice in choices}
        self.name = f"{'|'.join(map(str, choices))}{'?' * is_optional}"
        if is_optional:
            self._choices[None] = None

    def write(self, values: Column) -> Any:
        return values

    def read(self, raw: Any, count: int) -> Column:
        try:
            return [self._choices[each] for each in _column(raw, count, self.name)]
        except (KeyError, TypeError) as error:
            raise MessageError(f"not one of {self.name:.200}") from error


class _Optional(Shape):
    """Which values are given, and a column of those."""

    def __init__(self, inner: Shape) -> None:
        self._inner = inner
        self.name = f"({inner.name})?"

    def write(self, values: Column) -> Any:
        are_given = [value is not None for value in values]
        given = values if all(are_given) else list(compress(values, are_given))
        return are_given, self._inner.write(given)

    def read(self, raw: Any, count: int) -> Column:
        are_given, inner = _column(raw, 2, self.name)
        if not {bool} >= set(map(type, _column(are_given, count, self.name))):
            raise MessageError(f"not {self.name:.200}")
        given = self._inner.read(inner, sum(are_given))
        if len(given) == count:
            return given
        rest = iter(given)
        return [next(rest) if is_given else None for is_given in are_given]


class _Items(Shape):
    """Sequences: the length of each, and a column of the items of all."""

    def __init__(self, inner: Shape, make: Callable[[Any], Any], limits: Sequence[Limit]) -> None:
        self._inner, self._make, self._limits = inner, make, limits
        self.name = f"{make.__name__}[{inner.name}]{[*limits] or ''}"

    def write(self, values: Column) -> Any:
        items = values[0] if len(values) == 1 else chain.from_iterable(values)
        return list(map(len, values)), self._inner.write(tuple(items))

    def read(self, raw: Any, count: int) -> Column:
        lengths, inner = _column(raw, 2, self.name)
        is_number = {int} >= set(map(type, _column(lengths, count, self.name)))
        if not is_number or min(lengths, default=0) < 0:
            raise MessageError(f"not {self.name:.200}")
        longest = max(lengths, default=0)
        if any(isinstance(each, AtMost) and longest > each.length for each in self._limits):
            raise MessageError(f"too long for {self.name:.200}")
        items = self._inner.read(inner, sum(lengths))
        if count == 1:
            return [self._make(items)]
        rest = iter(items)
        return [self._make(islice(rest, length)) for length in lengths]


class _Map(Shape):
    """Mappings: a column of sequences of keys, and one of values."""

    def __init__(self, key: Shape, value: Shape) -> None:
        self._keys, self._values = _Items(key, tuple, ()), _Items(value, tuple, ())
        self.name = f"{{{key.name}: {value.name}}}"

    def write(self, values: Column) -> Any:
        values_of = [tuple(each.values()) for each in values]
        return self._keys.write(list(map(tuple, values))), self._values.write(values_of)

    def read(self, raw: Any, count: int) -> Column:
        keys, values = _column(raw, 2, self.name)
        columns = self._keys.read(keys, count), self._values.read(values, count)
        try:
            return [dict(zip(*each, strict=True)) for each in zip(*columns, strict=True)]
        except ValueError as error:
            raise MessageError(f"not {self.name:.200}") from error


class _Row(Shape):
    """Tuples of a fixed number of values, each of its own type: a column for each."""

    def __init__(self, name: str, shapes: Mapping[str, Shape]) -> None:
        self._shapes = tuple(shapes.values())
        told = ", ".join(f"{field}: {shape.name}" for field, shape in shapes.items())
        self.name = f"{name}({told})"

    def write(self, values: Column) -> Any:
        if not values:
            return None
        columns = zip(*self._rows(values), strict=True)
        return [shape.write(column) for shape, column in zip(self._shapes, columns, strict=True)]

    def read(self, raw: Any, count: int) -> Column:
        if not count:
            return _column(() if raw is None else raw, 0, self.name)
        raws = _column(raw, len(self._shapes), self.name)
        columns = [shape.read(each, count) for shape, each in zip(self._shapes, raws, strict=True)]
        return self._values(columns, count)

    def _rows(self, values: Column) -> Iterable[tuple[Any, ...]]:
        return values

    def _values(self, columns: Sequence[Column], count: int) -> Column:
        return list(zip(*columns, strict=True))


class _Record(_Row):
    """Dataclasses: a column for each field."""

    def __init__(self, kind: type) -> None:
        assert is_dataclass(kind), f"there is no shape for {kind}"
        hints = get_type_hints(kind, include_extras=True)
        names = [each.name for each in fields(kind)]
        super().__init__(kind.__name__, {name: shape_of(hints[name]) for name in names})
        self._kind = kind
        self._take = _taker(names)
        # A frozen class's own __init__ sets each field of each value with a call in Python: reading
        # 64 events would take 170 us instead of 105 (CPU, 2026).
        self._setters = [getattr(kind, name).__set__ for name in names]
        self._check: Callable[[Any], None] | None = getattr(kind, "__post_init__", None)

    def _rows(self, values: Column) -> Iterable[tuple[Any, ...]]:
        return map(self._take, values)

    def _values(self, columns: Sequence[Column], count: int) -> Column:
        values = list(map(object.__new__, repeat(self._kind, count)))
        for set_, column in zip(self._setters, columns, strict=True):
            deque(map(set_, values, column), maxlen=0)
        try:
            if self._check is not None:
                deque(map(self._check, values), maxlen=0)
        except (LocalLLMError, ValueError, TypeError) as error:
            raise MessageError(f"not {self.name:.200}: {error!s:.200}") from error
        return values


class OneOf(Shape):
    """Values of several dataclasses, one by one: the number of the class, and the fields."""

    def __init__(self, classes: Sequence[type]) -> None:
        self._rows = [_Record(each) for each in classes]
        self._numbers = {each: number for number, each in enumerate(classes)}
        self.name = " | ".join(row.name for row in self._rows)

    def write(self, values: Column) -> Any:
        numbers = [self._numbers[type(value)] for value in values]
        return [
            (number, self._rows[number].write((value,)))
            for number, value in zip(numbers, values, strict=True)
        ]

    def read(self, raw: Any, count: int) -> Column:
        return [self._read(each) for each in _column(raw, count, self.name)]

    def _read(self, raw: Any) -> Any:
        number, row = _column(raw, 2, self.name)
        if type(number) is not int or not 0 <= number < len(self._rows):
            raise MessageError("not a kind of message")
        (value,) = self._rows[number].read(row, 1)
        return value


class _Error(Shape):
    """Errors, as Failure describes them."""

    def __init__(self, kind: type[LocalLLMError]) -> None:
        self._kind, self._row = kind, _Record(Failure)
        self.name = f"{kind.__name__} as {self._row.name}"

    def write(self, values: Column) -> Any:
        return self._row.write([Failure.of(error) for error in values])

    def read(self, raw: Any, count: int) -> Column:
        try:
            errors = [failure.error() for failure in self._row.read(raw, count)]
        except ValueError as error:
            raise MessageError(str(error)) from error
        if not all(isinstance(error, self._kind) for error in errors):
            raise MessageError(f"not {self._kind.__name__}")
        return errors


def shape_of(annotation: Any, limits: Sequence[Limit] = (), *, is_optional: bool = False) -> Shape:
    """The shape of a field with this annotation."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return shape_of(inner[0], inner[1:], is_optional=is_optional)
    if origin in (Union, UnionType):
        kinds = [each for each in inner if each is not NoneType]
        if len(kinds) == 1:
            return shape_of(kinds[0], limits, is_optional=True)
        assert len(kinds) == len(inner), f"there is no shape for {annotation}"
        return OneOf(kinds)
    if annotation in _TYPES:
        return _Plain(annotation, limits, is_optional=is_optional)
    if origin is Literal:
        return _Choice(inner, is_optional=is_optional)
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return _Choice(list(annotation), is_optional=is_optional)
    if is_optional:
        return _Optional(shape_of(annotation, limits))
    if origin is tuple and inner[-1] is Ellipsis:
        return _Items(shape_of(inner[0]), tuple, limits)
    if origin is tuple:
        shapes = {str(place): shape_of(each) for place, each in enumerate(inner)}
        return _Row("tuple", shapes)
    if origin is Sequence:
        return _Items(shape_of(inner[0]), list, limits)
    if origin is Mapping:
        return _Map(shape_of(inner[0]), shape_of(inner[1]))
    assert isinstance(annotation, type), f"there is no shape for {annotation}"
    return _Error(annotation) if issubclass(annotation, LocalLLMError) else _Record(annotation)


def _taker(names: Sequence[str]) -> Callable[[Any], tuple[Any, ...]]:
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _column(raw: Any, count: int, name: str) -> tuple[Any, ...]:
    if type(raw) is not tuple or len(raw) != count:
        raise MessageError(f"not {name:.200}")
    return raw


def _is_within(values: Sequence[Any], limit: Limit) -> bool:
    match limit:
        case AtMost(length):
            return max(map(len, values)) <= length
        case Within(low, high):
            # Every float is checked: NaN need not show up as the smallest or the largest.
            ends = values if float in map(type, values) else (min(values), max(values))
            return all(low <= end <= high for end in ends)
