"""Typed, bounded access to the fields of an untrusted `config.json`."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf, nan
from typing import Any, NoReturn

from localllm.errors import CheckpointError, UnsupportedModelError, brief
from localllm.model.dtypes import DTYPES, DType

logger = logging.getLogger(__name__)

_FLOAT, _FLOATS = "__float__", {"Infinity": inf, "-Infinity": -inf, "NaN": nan}
REDOWNLOAD = "download the model again, or use another revision"
OTHER_ENGINE = "a model of docs/models.md, or vLLM for this one (it supports the widest set)"


@dataclass(frozen=True, slots=True)
class ConfigFields:
    """A JSON object and where it comes from; `read`: the names that were asked for so far.

    Every reader raises CheckpointError, naming the field and what it must be.
    """

    raw: Mapping[str, Any]
    where: str = "config.json"
    read: set[str] = field(default_factory=set, compare=False)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, of any type; `default` where it is absent."""
        self.read.add(name)
        return self.raw.get(name, default)

    def changed(self, changes: Mapping[str, Any]) -> "ConfigFields":
        """The same with other values; what is read there is read here."""
        return ConfigFields({**self.raw, **changes}, self.where, self.read)

    def fail(self, name: str, expected: str) -> NoReturn:
        """Raise CheckpointError for the field `name`."""
        raise CheckpointError(
            f"config field {name!r} must be {expected}, found {brief(self.get(name))}",
            where=self.where,
            hint=REDOWNLOAD,
        )

    def refuse(self, what: str) -> NoReturn:
        """Raise UnsupportedModelError: localllm has no `what`."""
        raise UnsupportedModelError(
            f"{what} not supported yet", where=self.where, hint=OTHER_ENGINE
        )

    def refuse_value(self, name: str, supported: str) -> NoReturn:
        """Raise UnsupportedModelError for the value of the field `name`."""
        raise UnsupportedModelError(
            f"config field {name!r} is {brief(self.raw.get(name))}; supported here: {supported}",
            where=self.where,
            hint=OTHER_ENGINE,
        )

    def only(self, name: str, *values: Any) -> None:
        """Refuse a field that is neither null nor one of `values`, the first of which is what the
        model is computed with. Raises: UnsupportedModelError.
        """
        if self.get(name) not in (None, *values):
            self.refuse_value(name, " or ".join(map(repr, values)) or "null")

    def architecture(self) -> str:
        """The name of the class that computes the model: the first of `architectures`."""
        names = self.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            self.fail("architectures", "a list that begins with the name of an architecture")
        return str(names[0])

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """A whole number from `low` to `high`; `default` where it is null or absent."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        """Like `integer`, but None where it is null or absent."""
        return None if self.get(name) is None else self.integer(name, low, high)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        """A number above `low` and at most `high`; `default` where it is null or absent."""
        value = self.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(name, f"a number above {low:g} and at most {high:g}")
        if not low < value <= high:  # false for NaN
            self.fail(name, f"a number above {low:g} and at most {high:g}")
        return float(value)

    def optional_number(self, name: str, low: float, high: float) -> float | None:
        """Like `number`, but None where it is null or absent."""
        return None if self.get(name) is None else self.number(name, low, high)

    def nonzero_number(self, name: str, low: float, high: float) -> float | None:
        """Like `optional_number`, but None also where it is 0."""
        return None if self.get(name) == 0 else self.optional_number(name, low, high)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false; `default` where it is null or absent."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, "true or false")
        return bool(value)

    def integers(self, name: str, low: int, high: int, count: int) -> tuple[int, ...] | None:
        """A list of `count` whole numbers from `low` to `high`; None where it is null or absent."""
        value = self.get(name)
        if value is None:
            return None
        numbers = value if isinstance(value, list) else []
        if len(numbers) != count or not all(
            type(each) is int and low <= each <= high for each in numbers
        ):
            self.fail(name, f"a list of {count} whole numbers from {low} to {high}")
        return tuple(numbers)

    def numbers(self, name: str, low: float, high: float, most: int) -> tuple[float, ...]:
        """A list of at most `most` numbers, each as for `number`; empty where null or absent."""
        value = self.get(name)
        found = [] if value is None else value
        if not isinstance(found, list) or len(found) > most:
            self.fail(name, f"a list of at most {most} numbers")
        each = [ConfigFields({name: one}, self.where) for one in found]
        return tuple(one.number(name, low, high) for one in each)

    def choices(self, name: str, known: tuple[str, ...], count: int) -> tuple[str, ...] | None:
        """A list of `count` strings, each one of `known`; None where it is null or absent."""
        value = self.get(name)
        if value is None:
            return None
        if (
            not isinstance(value, list)
            or len(value) != count
            or not all(isinstance(each, str) for each in value)
        ):
            self.fail(name, f"a list of {count} strings, each {' or '.join(known)}")
        for each in value:
            if each not in known:
                self.refuse(f"{name} with {brief(each)} (only {' and '.join(known)}) are")
        return tuple(value)

    def num_layers(self) -> int:
        """The number of layers."""
        return self.integer("num_hidden_layers", 1, 1024)

    def hidden_size(self) -> int:
        """The width of the residual stream."""
        return self.integer("hidden_size", 1, 1 << 20)

    def max_positions(self) -> int:
        """Positions that the model was made for."""
        return self.integer("max_position_embeddings", 1, 1 << 28, default=2048)

    def eps(self) -> float:
        """What norms add to the mean of squares."""
        return self.number("rms_norm_eps", 0.0, 1.0, default=1e-6)

    def window(self) -> int | None:
        """Tokens that a query may see, including itself; None: all."""
        return self.optional_integer("sliding_window", 1, 1 << 28)

    def num_experts(self, name: str = "num_experts") -> tuple[int, int]:
        """How many experts a layer has, and how many a row takes."""
        count = self.integer(name, 1, 1 << 16)
        return count, self.integer("num_experts_per_tok", 1, count)

    def routed_factor(self) -> float:
        """What the factors of a row's experts are multiplied by."""
        return self.number("routed_scaling_factor", 0.0, 1e6, default=1.0)

    def dtype(self) -> DType:
        """The dtype of the stored weights; float32 where the file does not say."""
        newer, older = self.get("dtype"), self.get("torch_dtype")
        value = newer or older
        if value is None:
            return "float32"
        for dtype, others in DTYPES.items():
            if value in (dtype, f"torch.{dtype}", *others):
                return dtype
        self.fail("dtype" if "dtype" in self.raw else "torch_dtype", f"one of {', '.join(DTYPES)}")

    def token_ids(self, name: str) -> tuple[int, ...]:
        """See `read_token_ids`."""
        return read_token_ids(self.get(name), f"{self.where}: {name}")


def plain_floats(value: Any) -> Any:
    """A config's value with its floats that JSON has no word for ({"__float__": "Infinity"})."""
    if isinstance(value, dict):
        name = value.get(_FLOAT)
        if len(value) == 1 and isinstance(name, str) and name in _FLOATS:
            return _FLOATS[name]
        return {key: plain_floats(each) for key, each in value.items()}
    return [plain_floats(each) for each in value] if isinstance(value, list) else value


def read_token_ids(value: Any, where: str) -> tuple[int, ...]:
    """One token id, a list of them or null, as a tuple; a warning names what is no id."""
    if value is None:
        return ()
    values = value if isinstance(value, list) else [value]
    flat = [part for each in values for part in (each if isinstance(each, list) else [each])]
    ids = [part for part in flat if type(part) is int and 0 <= part < 1 << 31]
    for other in flat:
        if other not in ids and other is not None:
            logger.warning("%s: %s is no token id; it is ignored", where, brief(other))
    return tuple(ids)
