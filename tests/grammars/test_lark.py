"""Grammars in Lark's notation describe texts, and are bounded before they are compiled."""

import time

import pytest
from forms import admits, state_of

from localllm.answer.grammar_compiler import check_grammar
from localllm.errors import RequestError
from localllm.text.grammar import Grammar


def lark(source: str) -> Grammar:
    return Grammar("lark", source)


FOLLOWED: dict[str, tuple[str, list[str], list[str]]] = {
    "texts": ('start: "a<|im_end|>" | "b" # <[2]>\n// "c', ["a<|im_end|>", "b"], ["c", "a"]),
    "an expression with tags": (r"start: /<[2]>|<\/a>/", ["<2>", "</a>"], ["<[2]>"]),
    "repetitions": ('start: "a"~2..3 b{2}\nb: "x"', ["aaxx", "aaaxx"], ["axx", "aax"]),
    "a schema": (
        'start: "x" %json {\n"type": "string", "pattern": "^[[:alpha:]]$"} "y"',
        ['x"a]"y'],
        ['x"a"y'],
    ),
    "a complement": ('start: T "."\nT: /[a-c]+/ & ~"abc"', ["ab.", "abcc."], ["abc."]),
    "complements of groups": (
        "start: T\nT: ~( /a+/ | (/b/) ) & ~~/[a-z]/",
        ["c"],
        ["a", "aa", "b", "cc"],
    ),
    "a common rule": ("%import common.INT\nstart: INT", ["12"], ["a"]),
    "an option": ('start: t "."\nt[lazy]: /a+b?/', ["a."], ["b."]),
    "a substring": ('start: T\nT: %regex {"substring_words": "a b c"}', ["b c", ""], ["ac"]),
    "a name like an option": ('start: stop "x"\nstop: "a"', ["ax"], ["a"]),
    "itself": ('start: "a" start | "b"', ["b", "aab"], ["a"]),
}


@pytest.mark.parametrize("name", sorted(FOLLOWED))
def test_a_grammar_admits_its_texts(name: str) -> None:
    source, matching, other = FOLLOWED[name]
    assert all(admits(lark(source), text) for text in matching)
    assert not any(admits(lark(source), text) for text in other)


def test_what_is_not_a_text_is_still_no_answer_of_a_complement() -> None:
    state = state_of(lark('start: T\nT: ~"abc"'))
    first = bytes([0xFF])  # in no text; and llguidance marks special tokens with it
    assert state.validate_tokens(list(first)) == 0
    assert state.validate_tokens(list("é".encode())) == 2


@pytest.mark.parametrize(
    ("source", "reason", "where"),
    [
        (
            'start: "a" <|im_end|>',
            "<|im_end|> names a token of the model",
            'line 1: start: "a" <|im_end|>',
        ),
        ('start: a\na: <[2]> "b"', "<[2]> names a token of the model", 'line 2: a: <[2]> "b"'),
        ("start: <[*]>", "<[*]> names a token of the model", "line 1: start: <[*]>"),
        ("start: @answer", "no grammar is named @answer", "line 1: start: @answer"),
        ('start: a\na[stop = "x"]: /b+/', "the option stop is not", 'line 2: a[stop = "x"]: /b+/'),
        (
            "start: a\na[max_tokens=3]: /b+/",
            "the option max_tokens",
            "line 2: a[max_tokens=3]: /b+/",
        ),
        (
            "start[temperature=0.5]: /b/",
            "the option temperature",
            "line 1: start[temperature=0.5]: /b/",
        ),
        (
            '%llguidance {"allow_invalid_utf8": true}\nstart: "a"',
            "allow_invalid_utf8 is not",
            "line 1",
        ),
        ('start: "a"\n  %json {"a": ', "no JSON follows %json", "line 2"),
        ("start: %regex 3", "no object follows %regex", "line 1"),
    ],
)
def test_what_is_no_text_is_refused_with_its_line(source: str, reason: str, where: str) -> None:
    with pytest.raises(RequestError) as found:
        check_grammar(lark(source))
    assert f"the grammar cannot be used: {reason}" in found.value.message
    assert found.value.where == where


def test_a_schema_within_is_read_like_any_other() -> None:
    with pytest.raises(RequestError, match="the JSON schema cannot be used: the keyword 'not'"):
        check_grammar(lark('start: %json {"not": {}}'))
    with pytest.raises(RequestError, match="too large"):
        check_grammar(lark('start: %json {"enum": [' + "1," * 9000 + "1]}"))
    with pytest.raises(RequestError, match="multipleOf is too large"):
        check_grammar(lark('start: %json {"multipleOf": 215656441}'))


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a{900}){1000}"),
        Grammar("regex", "((ab|[c-d]){30}x){30}{40}"),
        Grammar("regex", "a" * 40_000),
        lark("start: /(a{900}){1000}/"),
        lark('start: A\nA: B{1000}\nB: C{1000}\nC: "x"'),
        lark('start: a~1000\na: ("b" "c")~1000'),
        lark(
            "start: R0\n" + "\n".join(f"R{i}: R{i + 1} R{i + 1}" for i in range(30)) + '\nR30: "x"'
        ),
        lark("start: " + " ".join(['"' + "ab " * 1000 + '"'] * 12)),
    ],
)
def test_a_text_that_is_too_long_is_refused_before_it_is_written_out(grammar: Grammar) -> None:
    began = time.process_time()
    with pytest.raises(RequestError, match=r"it requires a text of .* bytes"):
        check_grammar(grammar)
    assert time.process_time() - began < 0.2


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "(a{180}){180}"),
        Grammar("regex", r"(\w{0,900} ?){0,1000}[^{}()|]{3}\{\(a\|b\)"),
        Grammar("regex", "(?i)(?P<n>a{30}|b{31}){30}"),
        lark("start: " + " | ".join(f'"{i} {"ab " * 100}"' for i in range(500))),
        lark('start: a{0,30000}\na: "b" start?'),
    ],
)
def test_long_choices_and_what_may_be_left_out_are_followed(grammar: Grammar) -> None:
    state = state_of(grammar)
    state.compute_bitmask()
    assert not state.is_error()
