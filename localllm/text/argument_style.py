"""How a family writes the arguments of a tool call where that is not JSON, and where such a call
ends.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from localllm.text.stop_strings import longest_overlap


class EndOfCall(Protocol):
    """Finds the mark that ends a call, in text that comes in pieces."""

    def find(self, piece: str) -> int:
        """The position after the mark in `piece`; -1 if the call does not end there."""


class EndOutsideQuotes(EndOfCall):
    """From `opens` to `closes` the mark is text.

    Each character is read only a few times, however long the call is.
    """

    def __init__(self, mark: str, opens: str, closes: str) -> None:
        self._mark, self._opens, self._closes = mark, opens, closes
        self._outside = re.compile(f"{re.escape(opens)}|{re.escape(mark)}")
        self._is_inside, self._overlap = False, ""

    def find(self, piece: str) -> int:
        seen, at = self._overlap + piece, 0
        while True:
            if self._is_inside:
                place = seen.find(self._closes, at)
                if place < 0:
                    break
                at, self._is_inside = place + len(self._closes), False
                continue
            found = self._outside.search(seen, at)
            if found is None:
                break
            at = found.end()
            if found[0] == self._mark:
                return at - len(self._overlap)
            self._is_inside = True
        rest = seen[at:]
        marks = (self._closes,) if self._is_inside else (self._opens, self._mark)
        keep = max(longest_overlap(rest, mark) for mark in marks)
        self._overlap = rest[len(rest) - keep :]
        return -1


class ArgumentStyle(Protocol):
    """How a family writes the arguments of a call, where that is not JSON."""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts in it that may be special tokens."""

    def with_schemas(self, schemas: Mapping[str, Mapping[str, Any]]) -> "ArgumentStyle":
        """The style with the schemas of each tool's arguments, by the names of both."""

    def rules(
        self, name: str, parameters: Mapping[str, Any], as_lark: Callable[[str], str]
    ) -> list[str]:
        """Lark rules, of which `name` stands for arguments that match the JSON schema of an object,
        `parameters`; others begin with `name`.
        """

    def shared_rules(self, as_lark: Callable[[str], str]) -> list[str]:
        """Rules that those of every tool refer to."""

    def read(self, text: str) -> tuple[str, dict[str, Any]] | None:
        """The name of the tool and the arguments of a call; None if `text` is no call."""

    def end_of_call(self, mark: str) -> EndOfCall:
        """A search for the end of a call that ends with `mark`."""
