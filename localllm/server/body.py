"""What all bodies that clients send have in common."""

from collections.abc import Iterable, Iterator
from math import isfinite
from typing import Annotated, Any, ClassVar, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

Name = Annotated[str, Field(max_length=300)]


def never(message: str, *, may_be_empty: bool = False) -> BeforeValidator:
    """For a field that is known and not supported: refuses any value."""

    def check(value: object) -> None:
        if value if may_be_empty else value is not None:
            raise ValueError(message)

    return BeforeValidator(check)


def _all_finite(values: Iterable[Any]) -> bool:
    """Whether all numbers are; models within have been asked themselves."""
    left = [values]
    while left:
        for each in left.pop():
            if isinstance(each, float) and not isfinite(each):
                return False
            if isinstance(each, dict | list):
                left.append(each.values() if isinstance(each, dict) else each)
    return True


class Body(BaseModel):
    """Types are not converted: "5" is not a number, and true is not 1. Unknown fields are kept to
    be named, but are not part of what is written again. `HARMLESS`: fields that have no effect
    here, and need not be named; `IS_OPEN`: which fields there are depends on the type, and all are
    part of it.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    HARMLESS: ClassVar[frozenset[str]] = frozenset()
    IS_OPEN: ClassVar[bool] = False

    @model_validator(mode="after")
    def _is_finite(self) -> Self:
        # pydantic looks only at fields that are floats, and 1e999 in a schema is read as infinity.
        if not _all_finite([*self.__dict__.values(), *(self.model_extra or {}).values()]):
            raise ValueError("JSON has no NaN, no Infinity, and no number beyond 1.8e308")
        return self

    @model_serializer(mode="wrap")
    def _without_unknown(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        written: dict[str, Any] = write(self)
        for name in () if self.IS_OPEN else self.model_extra or ():
            written.pop(name, None)
        return written

    def sent(self, *names: str, **others: Any) -> dict[str, Any]:
        """The fields with these names, and the `others`, that have a value."""
        found = {name: getattr(self, name) for name in names} | others
        return {name: value for name, value in found.items() if value is not None}

    def unknown_fields(self) -> Iterator[str]:
        """The names of unknown fields that have a value, with those of the fields around them."""
        more = {} if self.IS_OPEN else self.model_extra or {}
        for name, value in more.items():
            if value not in (None, False, "", [], {}) and name not in self.HARMLESS:
                yield name
        for field, described in type(self).model_fields.items():
            value = getattr(self, field)
            for each in value if isinstance(value, list) else (value,):
                if isinstance(each, Body):
                    outer = described.alias or field
                    yield from (f"{outer}.{name}" for name in each.unknown_fields())


class WholeBody(Body):
    """A whole body; unknown fields are reported, not refused, since clients send their own."""

    # OpenAI's.
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"user", "store", "metadata", "service_tier", "safety_identifier"}
    )

    @property
    def unknown(self) -> list[str]:
        """The names of unknown fields."""
        return sorted(set(self.unknown_fields()))
