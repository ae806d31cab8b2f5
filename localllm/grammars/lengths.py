"""How long a text is that a form leaves no choice about.

llguidance follows such a text to its end before it says what may come first, some 7 µs and 1 kB a
byte: `(a{900}){1000}` takes 1.2 s and 256 MB for its first mask.
"""

import re

from localllm.text.grammar import refused

# Bytes of UTF-8, each of which a short expression may have asked for.
MAX_TEXT_BYTES = 32 << 10
_COUNT = re.compile(r"\{\s*([0-9]{1,9})\s*(,\s*[0-9]*\s*)?\}")
_GROUP = re.compile(r"\(\?(?:P?<[^>]*>|[a-zA-Z-]*[:)])")
_ESCAPE = re.compile(r"\\(?:[xuU](?:\{[^}]*\}|[0-9A-Fa-f]{2,8})|[pP](?:\{[^}]*\}|.)|.)", re.DOTALL)


def check_length(num_bytes: int, named: str, where: str = "") -> None:
    """Refuse what asks for more than MAX_TEXT_BYTES of text. Raises: RequestError."""
    if num_bytes > MAX_TEXT_BYTES:
        shown = f"{num_bytes:,}" if num_bytes < 10**15 else "10^15 or more"
        raise refused(
            named,
            f"it asks for a text of {shown} bytes; at most {MAX_TEXT_BYTES:,} are followed",
            where,
        )


class TextLength:
    """The length of the longest text that some part of an expression has to consist of.

    Of alternatives the longest counts; a repetition as often as it must be repeated, and once at
    least. What is read comes in order; groups that are not closed are closed at the end.
    """

    def __init__(self) -> None:
        self._longest = self._length = self._last = 0
        self._outer: list[tuple[int, int]] = []

    def add(self, num_bytes: int) -> None:
        """An item of so many bytes."""
        self._last = num_bytes
        self._length += num_bytes

    def repeat(self, count: int) -> None:
        """What came last comes `count` times."""
        more = self._last * (max(1, count) - 1)
        self._last += more
        self._length += more

    def alternative(self) -> None:
        """What follows may stand in place of what came before it in this group."""
        self._longest, self._length = max(self._longest, self._length), 0

    def open(self) -> None:
        """A group begins."""
        self._outer.append((self._longest, self._length))
        self._longest = self._length = 0

    def close(self) -> None:
        """A group ends, if one was begun."""
        if self._outer:
            inner = max(self._longest, self._length)
            self._longest, self._length = self._outer.pop()
            self.add(inner)

    def result(self) -> int:
        """The length of all that was read."""
        while self._outer:
            self.close()
        return max(self._longest, self._length)


def regex_length(expression: str) -> int:
    """See TextLength: of an expression in Rust's syntax. What is none has some length, too."""
    length, at = TextLength(), 0
    while at < len(expression):
        char = expression[at]
        count = _COUNT.match(expression, at) if char == "{" else None
        if count is not None:
            length.repeat(int(count[1]))
            at = count.end()
        elif char == "(":
            found = _GROUP.match(expression, at)
            if found is None or not found[0].endswith(")"):  # else flags for what follows
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
    """Behind the character, escape or class that stands at `at`; classes may hold others."""
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
