"""Tools that a model may call: how its family writes a call, the grammar of it, and the way back.

Which way is read from the model's own chat template. Sources: Qwen2.5 and Hermes 3 (a JSON object
between <tool_call> tags), Llama 3.1 (a lone object with "parameters"), Mistral (a list behind
[TOOL_CALLS]; newer ones a name, [ARGS] and the arguments), each in its template.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from localllm.errors import RequestError
from localllm.grammar import JSON_SPACE, Grammar
from localllm.stop_strings import longest_overlap

Way = Literal["auto", "required"]
_JSON_PIECE = r'"(?:[^"\\]|\\.)*"|[{}:,]| '
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that can be called: `parameters` is the JSON schema of its arguments."""

    name: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` as JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a call is written: `opens`, `before` NAME `between` ARGUMENTS `after`, `closes`.

    Several are joined by `joint` between `opens` and `closes`; where it is None each has both, and
    where it is empty there is only ever one. `first` may stand in front.
    """

    opens: str
    before: str
    between: str
    after: str
    closes: str
    joint: str | None = None
    first: str = ""

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and are to be seen all the same."""
        return (self.first, self.opens, self.between, self.closes)


_NAMED = ('{"name": "', '", "arguments": ', "}")
HERMES = ToolFormat("<tool_call>\n", *_NAMED, "\n</tool_call>")
MISTRAL = ToolFormat("[TOOL_CALLS][", *_NAMED, "]", ", ")
MISTRAL_ARGS = ToolFormat("[TOOL_CALLS]", "", "[ARGS]", "", "")
LLAMA = ToolFormat("", '{"name": "', '", "parameters": ', "}", "", "", first="<|python_tag|>")


def find_tool_format(template: str) -> ToolFormat | None:
    """How the family of a chat template calls tools; None where it does not, as far as is known."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<tool_call>" in template and '"arguments"' in template.replace("\\", ""):
        return HERMES
    if '"parameters"' in template and "<|start_header_id|>" in template:
        return LLAMA
    return None


def tool_grammar(
    form: ToolFormat,
    tools: Sequence[Tool],
    way: Way,
    as_lark: Callable[[str], str],
    *,
    are_parallel: bool = True,
    answer: Grammar | None = None,
) -> Grammar:
    """What a model may answer that has `tools`: calls of them with arguments of their schemas, or,
    unless they are `required`, a text; one of `answer`, a JSON schema, where that is given.

    `as_lark` writes a literal text, special tokens by their numbers. Raises: RequestError.
    """

    def lark(text: str) -> str:
        return as_lark(text) if text else ""

    rules = ["%llguidance {}", "TEXT: /(.|\\n)*/"]
    for i, tool in enumerate(tools):
        head = form.before + json.dumps(tool.name, ensure_ascii=False)[1:-1] + form.between
        # Piece by piece, as JSON is read: an answer in JSON may begin alike.
        pieces = re.findall(_JSON_PIECE, head) if form.before else [head]
        literals = " ".join(map(as_lark, pieces))
        parameters = {"type": "object", **tool.parameters}
        if parameters["type"] != "object":
            raise RequestError(
                f"the arguments of {tool.name} are no object by their schema", param="tools"
            )
        rules.append(f"tool_{i}: {literals} {_inline(parameters)} {lark(form.after)}")
    rules.append("one: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
    more = f"({lark(form.joint)} one)*" if form.joint and are_parallel else ""
    rules += [f"body: one {more} {lark(form.closes)}", f"call: {lark(form.opens)} body"]
    has_many = form.joint is None and are_parallel
    rules += ["calls: call (SPACE call)*", "SPACE: /\\n?/"] if has_many else ["calls: call"]
    if way == "required":
        rules.append("start: calls")
    elif answer is not None:
        rules += ["start: calls | answer", f"answer: {_inline(json.loads(answer.source))}"]
    elif not form.opens:
        first = f"({lark(form.first)})?" if form.first else ""
        rules += [f"start: {first} calls | FREE", "FREE: /([^{](.|\\n)*)?/"]
    elif lark(form.opens).startswith("<["):  # a token of its own, which no text is
        rules.append("start: TEXT calls?")
    else:
        tag = form.opens.rstrip("\n")
        rules += [
            f"begun[lazy]: TEXT {lark(tag)}",
            f"begun_call: begun {lark(form.opens[len(tag) :])} body",
            f"start: begun_call{'*' if has_many else '?'} TEXT",
        ]
    return Grammar("lark", "\n".join(rules))


def _inline(schema: Any) -> str:
    if isinstance(schema, dict):
        schema = {**schema, "x-guidance": {"whitespace_pattern": JSON_SPACE}}
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


class ToolCallSplitter:
    """Splits a growing answer into text and calls; what turns out to be no call is text."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._tag = form.opens.rstrip("\n")
        self._held = ""
        self._is_calling = False
        self._has_begun = False

    def push(self, piece: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are certain now."""
        text = self._held + piece
        if not self._tag:
            return self._push_lone(text)
        said, calls = "", list[ToolCall]()
        while True:
            if not self._is_calling:
                place = text.find(self._tag)
                if place < 0:
                    keep = longest_overlap(text, self._tag)
                    said += text[: len(text) - keep]
                    self._held = text[len(text) - keep :]
                    return said, calls
                said, text, self._is_calling = said + text[:place], text[place:], True
            end = self._end_of_call(text)
            if end < 0:
                self._held = text
                return said, calls
            body, text = text[:end], text[end:]
            found = self._read(body)
            said, self._is_calling = said + ("" if found else body), False
            calls += found

    def flush(self) -> tuple[str, list[ToolCall]]:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        is_call = self._is_calling or not self._tag
        calls = self._read(held) if is_call else []
        return ("" if calls else held), calls

    def _end_of_call(self, text: str) -> int:
        """Behind the mark that ends a call which `text` begins with; -1 where it is not there yet.

        Arguments may hold the mark too: what ends before it must be whole.
        """
        mark = self._form.closes.strip("\n")
        if self._form.joint is not None or not mark:
            return -1
        place = text.find(mark)
        while place >= 0 and _is_cut(text[:place]):
            place = text.find(mark, place + 1)
        return -1 if place < 0 else place + len(mark)

    def _push_lone(self, text: str) -> tuple[str, list[ToolCall]]:
        """A family that marks a call by nothing: an answer that begins like one is held back."""
        self._held = ""
        seen = text.lstrip()
        begins = any(
            seen.startswith(mark) or mark.startswith(seen) for mark in ("{", self._form.first)
        )
        if not self._has_begun and begins:
            self._held = text
            return "", []
        self._has_begun = True
        return text, []

    def _read(self, text: str) -> list[ToolCall]:
        if self._form.before:
            return _read_objects(text)
        return [
            call
            for name, given, start in _heads(text)
            if (arguments := _object_at(text, start)) is not None
            and (call := _call(name, arguments, given)) is not None
        ]


def _heads(text: str) -> list[tuple[str, str | None, int]]:
    """Names and ids in front of arguments, and where those begin."""
    head = re.compile(r"\[TOOL_CALLS\]([^\[\]{}]{1,200})(?:\[CALL_ID\](\w+))?\[ARGS\]")
    return [(found[1].strip(), found[2], found.end()) for found in head.finditer(text)]


def _is_cut(text: str) -> bool:
    """Whether an object begins in `text` that does not end there."""
    place = text.find("{")
    if place < 0:
        return False
    try:
        json.JSONDecoder().raw_decode(text, place)
    except ValueError as error:
        # What is wrong before its end does not become right by what follows.
        is_open = isinstance(error, json.JSONDecodeError) and "Unterminated" in error.msg
        return is_open or getattr(error, "pos", 0) >= len(text.rstrip())
    except RecursionError:
        return False
    return False


def _read_objects(text: str) -> list[ToolCall]:
    calls, place = list[ToolCall](), text.find("{")
    while place >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        arguments = value.get("arguments", value.get("parameters"))
        if not isinstance(value.get("name"), str) or not isinstance(arguments, dict):
            return []
        call = _call(value["name"], arguments, value.get("id"))
        if call is None:
            return []
        calls.append(call)
        place = text.find("{", end)
    return calls


def _object_at(text: str, place: int) -> dict[str, Any] | None:
    try:
        value, _ = json.JSONDecoder().raw_decode(text, place)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _call(name: str, arguments: dict[str, Any], given: Any) -> ToolCall | None:
    """None where the arguments cannot be written as JSON: numbers without end."""
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError:  # half a character can only be escaped
        written = json.dumps(arguments)
    except ValueError:
        return None
    # Nine letters and figures: what Mistral's templates insist on, and others take.
    own = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    is_usable = isinstance(given, str) and re.fullmatch("[A-Za-z0-9]{9}", given)
    return ToolCall(given if is_usable else own, name, written)
