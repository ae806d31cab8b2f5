"""Resolves the references of a JSON schema, which may point only to places in the same document.

Source: JSON Schema 2020-12, core, sections 8.2 and 9.2; RFC 6901 (pointers). An `$id` that begins
with `#` is a name, as in drafts before 2019-09.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote, urldefrag, urljoin

from localllm.text.grammar import refused

# The values of these are not schemas.
_VALUES = {"const", "enum", "default", "examples"}


@dataclass(frozen=True, slots=True)
class Place:
    """A schema in its document: `base` is what its references are relative to."""

    schema: Any
    base: str
    pointer: str

    @property
    def where(self) -> str:
        """Its pointer for messages; empty for the whole document."""
        return "" if self.pointer == "#" else self.pointer

    def at(self, *keys: str | int) -> "Place":
        """The place within this one that `keys` lead to."""
        place = self
        for key in keys:
            steps = str(key).replace("~", "~0").replace("/", "~1")
            place = Place(place.schema[key], place._inner_base(), f"{place.pointer}/{steps}")
        return place

    def _inner_base(self) -> str:
        own = self.schema.get("$id") if isinstance(self.schema, dict) else None
        return urljoin(self.base, own) if isinstance(own, str) else self.base


class References:
    """The places of one document that can be referred to by name."""

    def __init__(self, schema: Any) -> None:
        self.root = Place(schema, "", "#")
        self._named: dict[str, Place] = {"": self.root}
        for place in _objects(self.root):
            own, anchor = place.schema.get("$id"), place.schema.get("$anchor")
            base = place.base
            if isinstance(own, str):
                base = urljoin(place.base, own.removesuffix("#"))
                self._named.setdefault(base, place)
            if isinstance(anchor, str):
                self._named.setdefault(f"{urldefrag(base).url}#{anchor}", place)

    def find(self, place: Place) -> Place:
        """The place that the `$ref` of `place` points to. Raises: RequestError."""
        reference = place.schema["$ref"]
        if not isinstance(reference, str):
            raise refused("JSON schema", "$ref must be a text", place.where)
        base = urldefrag(place._inner_base()).url
        # References within the document are joined by hand: urljoin cannot join some addresses.
        absolute = base + reference if reference.startswith("#") else urljoin(base, reference)
        document, fragment = urldefrag(absolute)
        fragment = unquote(fragment)
        if fragment and not fragment.startswith("/"):
            found = self._named.get(f"{document}#{fragment}")
        else:
            found = self._named.get(document)
        if found is None:
            reason = "$ref points outside the schema, or to a name that it does not have"
            raise refused("JSON schema", f"{reason}: {reference:.100}", place.where)
        try:
            for step in fragment.split("/")[1:]:
                key = step.replace("~1", "/").replace("~0", "~")
                found = found.at(int(key) if isinstance(found.schema, list) else key)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            reason = f"$ref points to nothing: {reference:.100}"
            raise refused("JSON schema", reason, place.where) from error
        return found


def _objects(root: Place) -> Iterator[Place]:
    """All objects in the document that can be schemas."""
    waiting = [root]
    while waiting:
        place = waiting.pop()
        keys: Iterable[Any] = ()
        if isinstance(place.schema, list):
            keys = range(len(place.schema))
        elif isinstance(place.schema, dict):
            yield place
            keys = [key for key in place.schema if key not in _VALUES]
        waiting += map(place.at, keys)
