"""Patterns as ECMA-262 has them, against texts that they match and others."""

import pytest
from forms import is_valid

from localllm.errors import RequestError
from localllm.grammars.pattern import rust_regex

MATCHES: list[tuple[str, list[str], list[str]]] = [
    # It is searched for; anchors stand at the ends, also of alternatives and groups.
    ("b", ["b", "abc", "\nb"], ["a", ""]),
    ("^a|b$", ["ax", "xb", "a"], ["xax"]),
    ("(?:^|,)x(?:,|$)", ["x", "a,x", "x,a"], ["ax", "xa"]),
    ("^$", [""], ["a", "\n"]),
    ("", ["", "a"], []),
    # Sets of characters: of ASCII, but for spaces.
    (r"^\d$", ["0", "9"], ["\u0663", "a"]),
    (r"^\D$", ["a", "\u0663", "\n"], ["5"]),
    (r"^\w$", ["a", "Z", "_", "0"], ["é", "-", "\u017f"]),
    (r"^\W$", ["é", " "], ["a", "_"]),
    (r"^\s$", [" ", "\t", "\n", "\x0b", "\xa0", "\u2028", "\u3000", "\ufeff"], ["\x85", "\u200b"]),
    (r"^\S$", ["a", "\x85"], [" ", "\ufeff"]),
    (r"^[\s\d]$", ["1", "\ufeff"], ["a"]),
    (r"^[^\s\d]$", ["a", "\x85"], ["1", "\ufeff"]),
    (r"^[\D]$", ["a"], ["1"]),
    (r"^\p{Lu}\P{Lu}$", ["Aa", "Äb"], ["AA", "a1"]),
    (r"^[\p{Script=Greek}x]$", ["α", "x"], ["a"]),
    (r"^[^\p{L}]$", ["1"], ["a", "é"]),
    # A dot is all but what ends lines.
    ("^.$", ["a", "😀", "\x85", "\x0b"], ["\n", "\r", "\u2028", "\u2029", ""]),
    # In a class every sign is itself.
    ("^[[:alpha:]]$", ["[]", ":]", "a]", "l]"], ["a", "b]", "x", "]"]),
    ("^[a&&b]$", ["a", "b", "&"], []),
    ("^[+--]$", ["+", ",", "-"], ["."]),
    ("^[a~~b]$", ["a", "b", "~"], []),
    ("^[ab-]$", ["a", "-"], [","]),
    (r"^[\b]$", ["\b"], ["b"]),
    (r"^[\]\\^-]$", ["]", "\\", "^", "-"], ["["]),
    ("^[^]$", ["a", "\n", "]"], [""]),
    ("^(?:[]|a)$", ["a"], ["]", ""]),
    ('^[^"]*$', ["", "a\\b", "\x01"], ['"', 'a"']),
    (r"^[^\\]+$", ['"', "a"], ["\\"]),
    (r"^[\x00-\x1f]$", ["\n", "\t"], ['"', "\\", "a"]),
    (r"^[\u0000-\uffff]$", ["a", '"'], ["😀"]),
    ("^[日-本]$", ["日", "本"], ["a"]),
    ("^[😀-😂]$", ["😁"], ["😃"]),
    # Outside of classes.
    (r"^a#b c/d\/e$", ["a#b c/d/e"], ["a"]),
    (r"^\cJ\t\v\f\r\n$", ["\n\t\x0b\x0c\r\n"], []),
    (r"^\x41\u0042\u{43}\u{1F600}\ud83d\ude00$", ["ABC😀😀"], ["abc"]),
    (r"^(?<year>\d{4})-(\d\d)$", ["2024-01"], ["24-01"]),
    (r"^\.\-\@\{\}$", [".-@{}"], ["a-@{}"]),
    ("^{a}]$", ["{a}]"], ["a"]),
    ("^a{2}b{1,2}c{1,}d*?e+?f??$", ["aabcde", "aabbcceef"], ["abc"]),
    ("^(a|b|)$", ["a", "b", ""], ["c"]),
]


@pytest.mark.parametrize(
    ("pattern", "matching", "other"), MATCHES, ids=lambda value: repr(value)[:40]
)
def test_a_pattern_means_what_ecma_262_says(
    pattern: str, matching: list[str], other: list[str]
) -> None:
    schema = {"type": "string", "pattern": pattern}
    # What only \u can write is written where a constant has it.
    has_controls = any(
        ord(char) < 32 and char not in "\b\t\n\f\r" for text in matching for char in text
    )
    if has_controls:
        schema = {"anyOf": [schema, {"const": ["\x01"]}]}
    for text in matching:
        assert is_valid(schema, text), text
    for text in other:
        assert not is_valid(schema, text), text


@pytest.mark.parametrize(
    ("pattern", "reason", "place"),
    [
        ("(?=a)b", "look-around", 1),
        ("a(?!b)", "look-around", 2),
        ("(?<=a)b", "look-around", 1),
        ("(?<!a)b", "look-around", 1),
        (r"(a)\1", "back-references", 4),
        (r"(?<n>a)\k<n>", "back-references", 8),
        (r"\bword\b", "word boundaries", 1),
        ("(?i)a", "an unknown kind of group", 1),
        ("a)", "unopened group", 2),
        ("(a", "unclosed group", 1),
        ("x[a", "unclosed character class", 2),
        ("*a", "nothing to repeat", 1),
        ("a**", "nothing to repeat", 3),
        ("a{2,1}", "a repetition out of bounds", 2),
        ("a{,3}", "a repetition without a lower bound", 2),
        ("[z-a]", "a range out of order", 2),
        (r"[a-\d]", "a range out of order", 2),
        (r"\q", r"\q is not an escape", 1),
        (r"\u12", r"\u is incomplete", 1),
        (r"\p{L", "a property without a name", 1),
        (r"\ud83d", "a lone surrogate", 1),
        ("a\\", "a backslash at the end", 2),
        (r"\0", "U+0000 is not allowed", 1),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_its_place(
    pattern: str, reason: str, place: int
) -> None:
    with pytest.raises(RequestError) as found:
        rust_regex(pattern)
    assert f"cannot be used: {reason}" in found.value.message
    assert found.value.where == f"character {place} of {pattern}"
