"""The keys of a GGUF file that describe its architecture, each checked as it is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from struct import Struct

from localllm.errors import CheckpointError, UnsupportedModelError, brief
from localllm.files.gguf import GgufHeader, GgufValue
from localllm.model.config_fields import OTHER_ENGINE

ARCHITECTURE = "general.architecture"
_MOST_LAYERS = 1024
_FLOAT32 = Struct("<f")
# What `general.type` calls the files that are no models, in words.
_OTHER_TYPES = {
    "adapter": "an adapter (LoRA), which changes another model",
    "mmproj": "the tower of a model that sees, without the model",
    "imatrix": "a table for quantizing, without a model",
}


class GgufKeys:
    """The keys of a file's architecture, without its name before them; `where`: the file.

    It notes which ones are read: a key that nobody reads may change what the model computes.
    """

    def __init__(self, header: GgufHeader) -> None:
        """Raises: UnsupportedModelError for a file that is no model; CheckpointError."""
        self.header, self.where = header, str(header.files[0])
        keys = header.keys
        kind = keys.get("general.type", "model")
        name = keys.get(ARCHITECTURE)
        if kind in _OTHER_TYPES or name == "clip":
            what = _OTHER_TYPES["mmproj" if name == "clip" else str(kind)]
            raise UnsupportedModelError(
                f"this file is {what}", where=self.where, hint="the file of the model itself"
            )
        if not isinstance(name, str):
            raise self.error(f"key {ARCHITECTURE!r} is missing")
        self.architecture = name
        beginning = f"{name}."
        self._own: Mapping[str, GgufValue] = {
            key.removeprefix(beginning): value
            for key, value in keys.items()
            if key.startswith(beginning)
        }
        self._read = set[str]()
        names = (each.split(".", 2) for each in header.tensors if each.startswith("blk."))
        self._in_layers = {parts[2] for parts in names if len(parts) == 3}

    def __contains__(self, name: str) -> bool:
        return name in self._own

    @property
    def num_layers(self) -> int:
        """The model's own layers, without those behind them that draft. Raises: as `integer`."""
        count = self.integer("block_count") - self.integer("nextn_predict_layers", 0)
        if not 1 <= count <= _MOST_LAYERS:
            raise self.error(f"the file claims to have {count:,} layers")
        return count

    def has_tensor(self, name: str) -> bool:
        """Whether a layer has a tensor of that name."""
        return name in self._in_layers

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number that is not negative. Raises: CheckpointError if it is none, or missing
        without a default.
        """
        value = self._value(name, default)
        if type(value) is not int or not 0 <= value < 1 << 40:
            raise self._wrong(name, "a whole number", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number: the shortest decimal one that is stored so, as 1e-6 is. Raises: as
        `integer`.
        """
        value = self._value(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
        ):
            raise self._wrong(name, "a finite number", value)
        return shortest(value)

    def flag(self, name: str, *, default: bool = False) -> bool:
        """True or false. Raises: as `integer`."""
        value = self._value(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | None = None) -> str:
        """A text. Raises: as `integer`."""
        value = self._value(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a text", value)
        return value

    def by_layer(self, name: str, count: int, default: int | None = None) -> list[int]:
        """A whole number for each layer, from a list of so many or from one for all.

        Raises: as `integer`.
        """
        value = self._value(name, default)
        if not isinstance(value, memoryview):
            return [self.integer(name, default)] * count
        if value.format not in "?bBhHiIqQ" or len(value) < count:
            raise self._wrong(name, f"a list of {count} whole numbers", value)
        found = [int(each) for each in value[:count]]
        if min(found, default=0) < 0 or max(found, default=0) >= 1 << 40:
            raise self._wrong(name, f"a list of {count} whole numbers", value)
        return found

    def sizes(self, name: str, default: int | None = None) -> list[int]:
        """The different values of a key of layers, from the smallest one on, without zeros: they
        are those of layers that have no such part. Raises: as `integer`.
        """
        return sorted({*self.by_layer(name, self.num_layers, default)} - {0})

    def skip_zeros(self, *names: str) -> None:
        """Note keys that are 0, by which they say that there is no such thing."""
        self._read |= {
            name for name in names if type(self._own.get(name)) is int and not self._own[name]
        }

    def skip(self, *names: str) -> None:
        """Note keys that say nothing here that others do not."""
        self._read |= {*names}

    def refuse_unread(self) -> None:
        """Raises: UnsupportedModelError for a key that nobody has read."""
        unread = sorted(self._own.keys() - self._read)
        if unread:
            name = brief(f"{self.architecture}.{unread[0]}")
            raise UnsupportedModelError(
                f"key {name} is not known, and may change what the model computes",
                where=self.where,
                hint=OTHER_ENGINE,
            )

    def error(self, problem: str) -> CheckpointError:
        """The error for a file that contradicts itself."""
        return CheckpointError(problem, where=self.where, hint="download the file again")

    def _value(self, name: str, default: GgufValue | None) -> GgufValue:
        self._read.add(name)
        value = self._own.get(name, default)
        if value is None:
            raise self.error(f"key {self.architecture}.{name} is missing")
        return value

    def _wrong(self, name: str, what: str, value: object) -> CheckpointError:
        return self.error(f"key {self.architecture}.{name} must be {what}, found {brief(value)}")


def shortest(value: float) -> float:
    """The number with the fewest digits that is `value` in float32; `value` if none is."""
    for num_digits in range(1, 10):
        short = float(f"{value:.{num_digits}g}")
        try:
            [stored] = _FLOAT32.unpack(_FLOAT32.pack(short))
        except OverflowError:  # rounded up, beyond the greatest one
            continue
        if stored == value:
            return short
    return float(value)
