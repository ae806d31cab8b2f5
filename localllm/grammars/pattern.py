r"""Translates patterns of JSON schemas, which are ECMA-262 regular expressions, to Rust's syntax.

Both use the same signs, but some differ in meaning: `\d` is ASCII in one and any digit in the
other; `[[:alpha:]]` is a class and then a `]` in one and the letters in the other; `&&` within a
class is two signs in one and an intersection in the other. So every sign is read by ECMA-262's
rules, and everything but letters and digits is written by its number.

What ECMA-262 allows only outside of Unicode mode (annex B.1.2) is read if it can have only one
meaning: `\-`, a lone `{` or `]`. No text may hold U+0000: llguidance, which quotes a class for
JSON, reads one with all control characters as one that has quotes and backslashes, too.

Sources: JSON Schema 2020-12, core, section 6.4; ECMA-262 (2024), sections 22.2.1 and 22.2.2;
regex-syntax, "Syntax".
"""

import re
from collections.abc import Iterable

from localllm.text.grammar import refused

Range = tuple[int, int]

_LAST = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_DIGITS: list[Range] = [(0x30, 0x39)]
_WORD: list[Range] = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
# WhiteSpace and LineTerminator, with the category Space_Separator.
_SPACE: list[Range] = [
    (0x09, 0x0D),
    (0x20, 0x20),
    (0xA0, 0xA0),
    (0x1680, 0x1680),
    (0x2000, 0x200A),
    (0x2028, 0x2029),
    (0x202F, 0x202F),
    (0x205F, 0x205F),
    (0x3000, 0x3000),
    (0xFEFF, 0xFEFF),
]
_LINE_ENDS: list[Range] = [(0x0A, 0x0A), (0x0D, 0x0D), (0x2028, 0x2029)]
_SETS = {"d": _DIGITS, "w": _WORD, "s": _SPACE}
_CONTROLS = {"t": 0x09, "n": 0x0A, "v": 0x0B, "f": 0x0C, "r": 0x0D}
_COUNT = re.compile(r"\{([0-9]+)(?:(,)([0-9]*))?\}")
_MAX_COUNT = 1 << 24


def rust_regex(pattern: str) -> str:
    """`pattern` in Rust's syntax, to be searched for as JSON Schema defines it.

    Raises: RequestError for an invalid pattern, or one that is not supported: look-around,
    back-references.
    """
    return _Translation(pattern).written()


class _Translation:
    """One pattern, read from left to right."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self._at = 0

    def written(self) -> str:
        """The whole pattern in Rust's syntax."""
        out, open_groups, is_repeatable = list[str](), list[int](), False
        while (char := self._peek()) is not None:
            start = self._at
            if char in "*+?" or _COUNT.match(self._pattern, start):
                if not is_repeatable:
                    raise self._error("nothing to repeat", start)
                out.append(self._quantifier())
                is_repeatable = False
                continue
            self._at += 1
            is_repeatable = char not in "(|^$"
            if char == "(":
                self._read_group(start)
                open_groups.append(start)
                out.append("(?:")
            elif char == ")":
                if not open_groups:
                    raise self._error("unopened group", start)
                open_groups.pop()
                out.append(")")
            elif char in "|^$":
                out.append(char)
            elif char == ".":
                out.append(_class(_LINE_ENDS, [], is_negated=True))
            elif char == "[":
                out.append(self._character_class(start))
            elif char == "\\":
                out.append(self._escape(start))
            elif char == "{" and self._peek() == ",":
                raise self._error("a repetition without a lower bound ({0,n} has one)", start)
            else:
                out.append(self._literal(ord(char), start))
        if open_groups:
            raise self._error("unclosed group", open_groups[-1])
        return "".join(out)

    def _peek(self) -> str | None:
        return self._pattern[self._at] if self._at < len(self._pattern) else None

    def _quantifier(self) -> str:
        """`*`, `+`, `?`, `{m,n}`; a preference for short texts has no effect here."""
        start = self._at
        found = _COUNT.match(self._pattern, start)
        if found is None:
            quantifier = self._pattern[start]
            self._at += 1
        else:
            self._at = found.end()
            least, most = int(found[1]), int(found[3]) if found[3] else None
            if max(least, most or 0) > _MAX_COUNT or (most is not None and least > most):
                raise self._error("a repetition out of bounds", start)
            quantifier = found[0]
        if self._peek() == "?":
            self._at += 1
        return quantifier

    def _read_group(self, start: int) -> None:
        """Read what follows a group's bracket: its name, or a sign that it has none."""
        if self._peek() != "?":
            return
        found = re.compile(r"\?(:|<(?![=!])[^>()]*>)").match(self._pattern, self._at)
        if found is None:
            rest = self._pattern[self._at : self._at + 3]
            is_look = rest.startswith(("?=", "?!", "?<=", "?<!"))
            raise self._error("look-around" if is_look else "an unknown kind of group", start)
        self._at = found.end()

    def _escape(self, start: int) -> str:
        """What follows a backslash outside of classes."""
        char = self._peek()
        if char is not None and char in "bB":
            raise self._error("word boundaries are not supported", start)
        if char is not None and (char == "k" or char in "123456789"):
            raise self._error("back-references are not supported", start)
        found = self._set_or_character(start)
        if isinstance(found, int):
            return self._literal(found, start)
        return _class(*found, is_negated=False)

    def _character_class(self, start: int) -> str:
        ranges, properties = list[Range](), list[str]()
        is_negated = self._peek() == "^"
        self._at += is_negated
        while (char := self._peek()) != "]":
            if char is None:
                raise self._error("unclosed character class", start)
            at = self._at
            first = self._member()
            if not isinstance(first, int):
                ranges += first[0]
                properties += first[1]
                continue
            last = first
            if self._peek() == "-" and self._pattern[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                found = self._member()
                if not isinstance(found, int) or found < first:
                    raise self._error("a range out of order", at)
                last = found
            ranges.append((first, last))
        self._at += 1
        return _class(ranges, properties, is_negated=is_negated)

    def _member(self) -> int | tuple[list[Range], list[str]]:
        """A character of a class, or a set of them."""
        start = self._at
        char = self._pattern[start]
        self._at += 1
        if char != "\\":
            return self._scalar(ord(char), start)
        if self._peek() == "b":
            self._at += 1
            return 0x08
        return self._set_or_character(start)

    def _set_or_character(self, start: int) -> int | tuple[list[Range], list[str]]:
        """What an escape stands for: ranges and properties, or one character."""
        char = self._peek()
        if char is None:
            raise self._error("a backslash at the end", start)
        self._at += 1
        if char in "dws":
            return _SETS[char], []
        if char in "DWS":
            return _others(_SETS[char.lower()]), []
        if char in "pP":
            return [], [self._property(char, start)]
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char in "xuc0":
            return self._number(char, start)
        if char.isascii() and (char.isalnum() or char == "_"):
            raise self._error(f"\\{char} is not an escape", start)
        return self._scalar(ord(char), start)

    def _property(self, char: str, start: int) -> str:
        found = re.compile(r"\{([A-Za-z0-9_]+(?:=[A-Za-z0-9_]+)?)\}").match(self._pattern, self._at)
        if found is None:
            raise self._error("a property without a name in braces", start)
        self._at = found.end()
        return f"\\{char}{{{found[1]}}}"

    def _number(self, char: str, start: int) -> int:
        r"""`\xHH`, `\uHHHH`, two of those that make a surrogate pair, `\u{H}`, `\cX`, `\0`."""
        forms = {
            "x": r"([0-9A-Fa-f]{2})",
            "u": r"([Dd][89ABab][0-9A-Fa-f]{2})\\u([Dd][C-Fc-f][0-9A-Fa-f]{2})"
            r"|([0-9A-Fa-f]{4})|\{([0-9A-Fa-f]+)\}",
            "c": r"([A-Za-z])",
            "0": r"(?![0-9])",
        }
        found = re.compile(forms[char]).match(self._pattern, self._at)
        if found is None:
            raise self._error(f"\\{char} is incomplete", start)
        self._at = found.end()
        if char == "0":
            return 0
        if char == "c":
            return ord(found[1]) % 32
        if char == "u" and found[1]:
            return 0x10000 + ((int(found[1], 16) & 0x3FF) << 10) + (int(found[2], 16) & 0x3FF)
        return self._scalar(int(next(filter(None, found.groups())), 16), start)

    def _literal(self, code: int, start: int) -> str:
        if code == 0:
            raise self._error("U+0000 is not allowed", start)
        char = chr(self._scalar(code, start))
        return char if char.isalnum() else _by_number(code)

    def _scalar(self, code: int, start: int) -> int:
        if code > _LAST or code in _SURROGATES:
            raise self._error("a lone surrogate, or not a character", start)
        return code

    def _error(self, reason: str, at: int) -> Exception:
        shown = self._pattern if len(self._pattern) <= 200 else self._pattern[at : at + 200]
        return refused("JSON schema", f"{reason} in a pattern", f"character {at + 1} of {shown}")


def _by_number(code: int) -> str:
    return f"\\x{{{code:X}}}"


def _class(ranges: Iterable[Range], properties: Iterable[str], *, is_negated: bool) -> str:
    """A class in Rust's syntax, without U+0000."""
    kept = [(max(first, 1), last) for first, last in ranges if last]
    inside = "".join(f"{_by_number(first)}-{_by_number(last)}" for first, last in kept)
    inside += "".join(properties)
    if is_negated:
        return f"[^\\x{{0}}{inside}]"
    if not inside:  # matches nothing
        return f"[^\\x{{0}}-{_by_number(_LAST)}]"
    return f"[{inside}&&[^\\x{{0}}]]" if properties else f"[{inside}]"


def _others(ranges: Iterable[Range]) -> list[Range]:
    """All characters except those of `ranges`, which are in order."""
    others, start = list[Range](), 0
    for first, last in ranges:
        others.append((start, first - 1))
        start = last + 1
    return [*others, (start, _LAST)]
