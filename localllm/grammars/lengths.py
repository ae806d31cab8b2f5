"""The length of text that a format requires, without any choice.

llguidance follows such a text to its end before it computes the first mask, at some 7 µs and 1 kB
a byte: `(a{900}){1000}` takes 1.2 s and 256 MB for its first mask.
"""

import re

from localllm.text.grammar import refused

# Bytes of UTF-8, which even a short expression may require.
MAX_TEXT_BYTES = 32 << 10
_COUNT = re.compile(r"\{\s*([0-9]{1,9})\s*(,\s*[0-9]*\s*)?\}")
_GROUP = re.compile(r"\(\?(?:P?<[^>]*>|[a-zA-Z-]*[:)])")
_ESCAPE = re.compile(r"\\(?:[xuU](?:\{[^}]*\}|[0-9A-Fa-f]{2,8})|[pP](?:\{[^}]*\}|.)|.)", re.DOTALL)


def check_length(num_bytes: int, named: str, where: str = "") -> None:
    """Refuse a format that requires more than MAX_TEXT_BYTES of text. Raises: RequestError."""
    if num_bytes > MAX_TEXT_BYTES:
        shown = f"{num_bytes:,}" if num_bytes < 10**15 else "10^15 or more"
        raise refused(
            named,
            f"it requires a text of {shown} bytes; at most {MAX_TEXT_BYTES:,} are allowed",
            where,
        )


class TextLength:
    """The length of the longest text that a part of an expression requires.

    Of alternatives, the longest counts; a repetition counts as often as it must occur, at least
    once. Call the methods in the order of the expression; open groups are closed at the end.
    """

    def __init__(self) -> None:
        self._longest = self._length = self._last = 0
        self._outer: list[tuple[int, int]] = []

    def add(self, num_bytes: int) -> None:
        """Add an item of `num_bytes` bytes."""
        self._last = num_bytes
        self._length += num_bytes

    def repeat(self, count: int) -> None:
        """Repeat the last item `count` times."""
        more = self._last * (max(1, count) - 1)
        self._last += more
        self._length += more

    def alternative(self) -> None:
        """Begin an alternative to what came before it in this group."""
        self._longest, self._length = max(self._longest, self._length), 0

    def open(self) -> None:
        """Begin a group."""
        self._outer.append((self._longest, self._length))
        self._longest = self._length = 0

    def close(self) -> None:
        """End a group, if one was begun."""
        if self._outer:
            inner = max(self._longest, self._length)
            self._longest, self._length = self._outer.pop()
            self.add(inner)

    def result(self) -> int:
        """The length for everything that was added."""
        while self._outer:
            self.close()
        return max(self._longest, self._length)


def regex_length(expression: str) -> int:
    """The TextLength of an expression in Rust's syntax; an invalid one has some length, too."""
    length, at = TextLength(), 0
    while at < len(expression):
        char = expression[at]
        count = _COUNT.match(expression, at) if char == "{" else None
        if count is not None:
            length.repeat(int(count[1]))
            at = count.end()
        elif char == "(":
            found = _GROUP.match(expression, at)
            if found is None or not found[0].endswith(")"):  # otherwise flags, not a group
                length.open()
            at = found.end() if found else at + 1
        elif char == ")":
            length.close()
            at += 1
        elif char == "|":
            length.alternative()
            at += 1
        elif char in "*+?^$":
            at += 1
        else:
            length.add(len(char.encode(errors="replace")))
            at = _end_of_item(expression, at)
    return length.result()


def _end_of_item(expression: str, at: int) -> int:
    """The position after the character, escape or class at `at`; classes may hold others."""
    if expression[at] == "\\":
        found = _ESCAPE.match(expression, at)
        return found.end() if found else at + 1
    if expression[at] != "[":
        return at + 1
    at += 1
    at += expression[at : at + 1] == "^"
    at += expression[at : at + 1] == "]"
    depth = 1
    while at < len(expression) and depth:
        char = expression[at]
        depth += (char == "[") - (char == "]")
        at += 2 if char == "\\" else 1
    return at
