"""Reads grammars in Lark's notation before llguidance gets them.

A grammar describes a text. Other features of llguidance's dialect are refused, since the answer
would not be what the grammar says: tokens by name or number, which are not text; text that is
hidden from the answer (`stop`); options that only some engines obey (`temperature`, `max_tokens`).
JSON schemas within are read like any other. A complement (`~`) is taken among all texts, not all
bytes: some bytes are not text, and some mean special tokens.

Source: llguidance, docs/syntax.md, and its lexer, parser/src/lark/lexer.rs (MIT); the tokens below
are those of the lexer.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Any

from localllm.grammars.lengths import TextLength, check_length, regex_length
from localllm.text.grammar import refused

_TOKEN = re.compile(
    r"""(?P<space>[ \t]+|(?:\#|//)[^\n]*)
    |(?P<line>(?:\r?\n)+[ \t]*)
    |(?P<text>"(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1F\x7F])*"i?)
    |(?P<regex>/(?:\\.|[^/\\])+/[imslux]*)
    |(?P<token><[^<>\s]+>)
    |(?P<grammar>@[A-Za-z0-9_-]+)
    |(?P<statement>%[a-z]+)
    |(?P<name>!?[?_]?[A-Za-z][A-Za-z0-9_-]*)
    |(?P<number>[0-9]+)
    |(?P<sign>\.\.|::|->|.)""",
    re.VERBOSE,
)
_REFUSED_OPTIONS = {"stop", "max_tokens", "temperature"}
_ANY_TEXT = "/(?s:.*)/"


@dataclass(frozen=True, slots=True)
class _Token:
    """`text` is written for llguidance; `line` counts from 1."""

    kind: str
    text: str
    line: int


def read_lark(
    source: str, read_schema: Callable[[Any], Mapping[str, Any]], *, names_tokens: bool
) -> str:
    """`source` rewritten for llguidance; `read_schema` reads the schemas in it.

    `names_tokens`: the grammar is our own, and may name tokens by id. Raises: RequestError.
    """
    tokens = _tokens(source, read_schema)
    meant = [token for token in tokens if token.kind not in ("space", "line")]
    for token, following in zip_longest(meant, meant[1:]):
        reason = ""
        if token.kind == "token" and not names_tokens:
            reason = f"{token.text} names a token of the model, which is not text"
        elif token.kind == "grammar":
            reason = f"no grammar is named {token.text}"
        elif token.text in _REFUSED_OPTIONS and following is not None and following.text == "=":
            reason = f"the option {token.text} is not supported"
        if reason:
            line = source.split("\n")[token.line - 1].strip()
            raise refused("grammar", reason, f"line {token.line}: {line}")
    check_length(_longest_text(tokens), "grammar")
    return "".join(_among_texts(tokens))


def _tokens(source: str, read_schema: Callable[[Any], Mapping[str, Any]]) -> list[_Token]:
    """All tokens of `source`; the JSON of a statement is part of its token."""
    tokens, at, line = list[_Token](), 0, 1
    while at < len(source):
        found = _TOKEN.match(source, at)
        assert found is not None
        assert found.lastgroup is not None
        text, end = found[0], found.end()
        if text in ("%json", "%regex", "%llguidance"):
            value, end = _read_json(source, end, text, line)
            if text == "%json":
                value = read_schema(value)
            elif "allow_invalid_utf8" in value:
                raise refused("grammar", "allow_invalid_utf8 is not supported", f"line {line}")
            # Keep the number of line ends: errors name lines.
            space = "\n" * source.count("\n", at, end) or " "
            text += space + json.dumps(value, ensure_ascii=False)
        tokens.append(_Token(found.lastgroup, text, line))
        line += source.count("\n", at, end)
        at = end
    return tokens


def _read_json(source: str, at: int, statement: str, line: int) -> tuple[Any, int]:
    at = re.compile(r"[ \t\r\n]*").match(source, at).end()  # type: ignore[union-attr]
    try:
        value, end = json.JSONDecoder().raw_decode(source, at)
    except (ValueError, RecursionError) as error:
        raise refused("grammar", f"no JSON follows {statement}", f"line {line}") from error
    if statement != "%json" and not isinstance(value, dict):
        raise refused("grammar", f"no object follows {statement}", f"line {line}")
    return value, end


def _among_texts(tokens: Sequence[_Token]) -> Iterator[str]:
    """The tokens, with each complement of an item intersected with all texts."""
    depth, begun = 0, list[int]()  # of brackets: here, and at each complement that is still open
    meant = [token for token in tokens if token.kind not in ("space", "line")]
    following = iter([*meant[1:], None])
    for token in tokens:
        if token.kind in ("space", "line"):
            yield token.text
            continue
        behind = next(following)
        counts = behind is not None and behind.kind == "number"  # as in "a"~2..3
        if token.text == "~" and not counts:
            begun.append(depth)
            yield f"({_ANY_TEXT} & ~"
            continue
        yield token.text
        depth += (token.text in "([") - (token.text in ")]")
        if token.text not in "([":
            while begun and begun[-1] == depth:
                begun.pop()
                yield ")"


def _longest_text(tokens: Sequence[_Token]) -> int:
    """The longest text that any definition of a grammar requires; see TextLength."""
    bodies = _bodies(tokens)
    lengths, begun = dict[str, int](), set[str]()
    for name in bodies:
        waiting = [name]
        while waiting:
            name = waiting[-1]
            if name in lengths:
                waiting.pop()
            elif name in begun:  # everything it names is known, except what names it in turn
                lengths[name] = _length(bodies[name], lengths)
            else:
                begun.add(name)
                named = (each.text for each in bodies[name] if each.kind == "name")
                waiting += [each for each in named if each in bodies and each not in begun]
    return max(lengths.values(), default=0)


def _bodies(tokens: Sequence[_Token]) -> dict[str, list[_Token]]:
    """The definitions, by name. A definition begins on a new line; no other line has a colon."""
    bodies = dict[str, list[_Token]]()
    body: list[_Token] = []
    for is_line_end, line in groupby(tokens, lambda token: token.kind == "line"):
        meant = [] if is_line_end else [token for token in line if token.kind != "space"]
        if not meant:
            continue
        colon = next((i for i, token in enumerate(meant) if token.text == ":"), None)
        if meant[0].kind == "name" and colon is not None:
            body = bodies.setdefault(meant[0].text.lstrip("!?"), [])
            meant = meant[colon + 1 :]
        body += meant
    return bodies


def _length(body: Sequence[_Token], lengths: Mapping[str, int]) -> int:
    length = TextLength()
    for i, token in enumerate(body):
        before = body[i - 1].text if i else ""
        if token.kind == "text":
            length.add(len(token.text.encode()) - 2)
        elif token.kind == "regex":
            length.add(regex_length(token.text[1 : token.text.rindex("/")]))
        elif token.kind == "name":
            length.add(lengths.get(token.text, 0))
        elif token.kind == "number" and before in ("{", "~"):
            length.repeat(int(token.text[:9]))
        elif token.text in ("(", "["):
            length.open()
        elif token.text in (")", "]"):
            length.close()
        elif token.text in ("|", "&"):
            length.alternative()
    return length.result()
