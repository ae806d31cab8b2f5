"""Calls without the marks of their family: an answer that is nothing but JSON which names a tool.

Models of a family that marks its calls leave the marks out now and then, and Qwen2.5-Coder always
does: it writes the object bare, or in a code block, behind some text or not.
"""

import json
import re
from collections.abc import Collection
from typing import Any

from localllm.text.json_calls import CALL_KEYS, read_call

_FENCE, _TAG = "```", "<tools>"
_LANGUAGES = ("json", "jsonc", "jsonl", "tool_call", "tool_calls", "tools", "xml", "plaintext")
# Between the objects of calls; and what may become one of these.
_BETWEEN = re.compile(r"[\s\[\],;]|```[\w+-]*|</?tools>|</tool_call>")
_MARKS = (_FENCE, _TAG, "</tools>", "</tool_call>")
_KEY_OF_NAME = ("name", "tool_name")


class _Object:
    """Follows a JSON object, and knows early that it is not a call of one of `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._pieces: list[str] = []
        self._depth = 0
        self._is_text = self._is_escaped = self._is_value = False
        # Of the outermost object: the string that is read, and the name whose value comes.
        self._text, self._key = "", ""
        self.may_be_call = True

    def push(self, text: str, start: int) -> int:
        """Read `text` from `start` on; the position behind the object, -1 if it goes on."""
        for at in range(start, len(text)):
            self._read(text[at])
            if not self.may_be_call or self._depth == 0:
                self._pieces.append(text[start : at + 1])
                return at + 1
        self._pieces.append(text[start:])
        return -1

    def call(self) -> tuple[str, dict[str, Any]] | None:
        """The call that the whole object is; None if it is none."""
        try:
            value = json.loads("".join(self._pieces))
        except (ValueError, RecursionError):
            return None
        if not set(value) <= set(CALL_KEYS):
            return None
        found = read_call(value)
        if found is None or found[0] not in self._names:
            return None
        # The definition of a tool has a schema in the place of arguments.
        is_schema = found[1].get("type") == "object" and "properties" in found[1]
        return None if is_schema else found

    def _read(self, char: str) -> None:
        if self._is_text:
            self._read_in_text(char)
        elif char == '"':
            self._is_text, self._text = True, ""
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1
        elif self._depth == 1 and char in ":,":
            self._is_value = char == ":"
            self._key = self._text if self._is_value else ""

    def _read_in_text(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == '"':
            self._is_text = False
        if self._depth > 1 or (self._is_value and self._key not in _KEY_OF_NAME):
            return
        known = self._names if self._is_value else CALL_KEYS
        if not self._is_text:
            self.may_be_call = self._text in known
            return
        self._text += char
        self.may_be_call = any(each.startswith(self._text) for each in known)


class LoneCalls:
    """Finds such calls at the end of a growing answer. Text is held back while it may be one."""

    def __init__(self, names: Collection[str]) -> None:
        """`names`: of the tools; with none, all text is said at once."""
        self._names = names
        self._held = ""  # may be calls, from its beginning on
        self._between = ""  # of it, what is behind the last object
        self._object: _Object | None = None
        self._calls: list[tuple[str, dict[str, Any]]] = []
        self._is_held = False
        # Whether nothing was said yet, and whether this is within other code; how the line begins.
        self._is_first, self._is_code, self._line = True, False, ""

    def push(self, text: str) -> str:
        """The text that is certain now."""
        if not self._names:
            return text
        said = ""
        while text:
            if not self._is_held:
                place = self._beginning(text)
                said += text[:place]
                text = text[place:]
                continue
            end = self._follow(text)
            self._held += text[:end]
            text = text[end:]
            if not self._may_go_on():
                said += self.flush_text()
        return said

    def flush(self) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
        """The rest of the text, or the calls that it is; call it when no more text comes."""
        if self._is_held and self._object is None and self._calls:
            calls = self._calls
            self.flush_text()
            return "", calls
        return self.flush_text(), []

    def flush_text(self) -> str:
        """The text that was held back, which is no call."""
        held, self._held, self._between, self._object, self._calls = self._held, "", "", None, []
        self._is_held = False
        if held:
            self._is_first = self._is_first and held.isspace()
            self._line = held.rpartition("\n")[2].strip()[: len(_FENCE)]
            self._is_code = held.count(_FENCE) % 2 == 1
        return held

    def _beginning(self, text: str) -> int:
        """Where calls may begin in `text`; what comes before is said."""
        for at, char in enumerate(text):
            opens = char in (_FENCE[0], _TAG[0]) or (self._is_first and char in "{[")
            if opens and not self._line and not self._is_code:
                self._is_held = True
                return at
            self._is_first = self._is_first and char.isspace()
            if char == "\n":
                self._line = ""
            elif len(self._line) < len(_FENCE) and not char.isspace():
                self._line += char
                if self._line == _FENCE:  # the end of other code
                    self._is_code = False
        return len(text)

    def _follow(self, text: str) -> int:
        """Read on in what may be calls; the position up to which it was read."""
        if self._object is None:
            brace = text.find("{")
            self._between += text if brace < 0 else text[:brace]
            if brace != 0 and not self._is_between(ends=brace >= 0):
                return len(text) if brace < 0 else brace
            if brace < 0:
                return len(text)
            self._object = _Object(self._names)
            start = brace
        else:
            start = 0
        end = self._object.push(text, start)
        if end < 0 or not self._object.may_be_call:
            return len(text) if end < 0 else end
        call, self._object, self._between = self._object.call(), None, ""
        if call is None:
            self._between = "x"  # what no call has beside it
        else:
            self._calls.append(call)
        return end

    def _may_go_on(self) -> bool:
        if self._object is not None:
            return self._object.may_be_call
        return self._is_between(ends=False)

    def _is_between(self, *, ends: bool) -> bool:
        """Whether what is behind the last object may stand there; `ends`: it is whole."""
        rest, languages = (
            _BETWEEN.sub("", self._between),
            re.findall(r"```([\w+-]+)", self._between),
        )
        if ends:
            return not rest and all(each in _LANGUAGES for each in languages)
        begun = any(mark.startswith(rest) for mark in _MARKS)
        return begun and all(any(own.startswith(each) for own in _LANGUAGES) for each in languages)
