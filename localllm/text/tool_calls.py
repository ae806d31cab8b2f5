"""Tool calls: how a model's family writes them, a grammar for them, and how to read them.

The model's own chat template shows the format. Sources: Qwen2.5 and Hermes 3 (a JSON object between
<tool_call> tags), Llama 3.1 (a lone object with "parameters"), Mistral (a list after [TOOL_CALLS];
newer ones a name, [ARGS] and the arguments), Granite 3 (a list after <|tool_call|>), Command R7B
and A (a numbered list in an action), GLM-4 (a line with the name, then the arguments), Qwen3-Coder,
Seed-OSS and GLM-4.5 and later (arguments between tags, see tagged_arguments.py), each in its
template; gpt-oss (the name, a channel and a type of content, which its template and the model write
in two orders), also in openai/harmony, docs/format.md.
"""

import json
import re
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from localllm.errors import RequestError
from localllm.text.argument_style import ArgumentStyle, EndOfCall
from localllm.text.grammar import COMPACT, LOOSE, Grammar, lark_literal
from localllm.text.json_calls import read_call
from localllm.text.lone_calls import LoneCalls
from localllm.text.quoted_arguments import QuotedArguments
from localllm.text.stop_strings import longest_overlap
from localllm.text.tagged_arguments import KEYS_IN_LINES, KEYS_INLINE, TaggedArguments

Way = Literal["auto", "required"]
_JSON_PIECE = r'"(?:[^"\\]|\\.)*"|[{}:,]| '
_HEAD = re.compile(r"\[TOOL_CALLS\](?P<name>[^\[\]{}]{1,200})(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]")
# A name on a line of its own, and its arguments in the next; and what may become one.
_LINE = re.compile(r"(?P<name>[^ \t\n{}]{1,128})\n(?=\{)(?P<id>)")
# A name, the channel unless it came before, and the type of the arguments.
_HARMONY = re.compile(
    r"to=functions\.(?P<name>[^\s{}]{1,200}?)(?P<id>)(?:<\|channel\|>commentary)?"
    r"(?: ?<\|constrain\|>json| json| )?<\|message\|>"
)
_BEGUN_LINE = re.compile(r"[^ \t\n{}]{0,128}|[^ \t\n{}]{1,128}\n(\{.*)?", re.DOTALL)
# Of an answer where calls have no mark: as many characters as tell a call from a text.
_TELLING_CHARS = 80
# Lark terminals that match a text which is no call, where calls have no mark.
_NO_OBJECT = r"/([^{](.|\n)*)?/"
_NO_LINE = r"/[^ \t\n{}]*(\n([^{](.|\n)*)?|[ \t{}](.|\n)*)?/"
# Stands for the number that a model gives its call.
_NUMBER = '"0"'
# In a JSON string: its end, an escape, or a character that must not be in it.
_IN_TEXT = re.compile(r'["\\\x00-\x1f]')
_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that can be called: `parameters` is the JSON schema of its arguments, all of which
    is enforced if the tool is `strict`, otherwise what can be.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = True


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool; `arguments` as JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a call is written: `opens`, `before` NAME `between` ARGUMENTS `after`, `closes`.

    Several calls are joined by `joint` between `opens` and `closes`; if it is None, each call has
    both, and if it is empty, there is only ever one. `first` may come before everything. `others`
    may stand in the place of `between`. `style`: how ARGUMENTS are written, if not as JSON; `head`:
    what comes before ARGUMENTS where the name is not in JSON. `names`: the tools whose calls are
    read without marks too, see lone_calls.py. `is_forced`: the answer can only be calls.
    """

    opens: str
    before: str
    between: str
    after: str
    closes: str
    joint: str | None = None
    first: str = ""
    others: tuple[str, ...] = ()
    style: ArgumentStyle | None = None
    head: re.Pattern[str] = _HEAD
    names: frozenset[str] = frozenset()
    is_forced: bool = False

    @property
    def is_line(self) -> bool:
        """Whether a call has no mark, and begins with a line that is the name."""
        return not (self.opens or self.before)

    def may_be_call(self, beginning: str) -> bool:
        """Of an answer where calls have no mark: whether one may begin like this."""
        if self.is_line:
            return _BEGUN_LINE.fullmatch(beginning) is not None
        marks = (mark for mark in ("{", self.first) if mark)
        return any(mark.startswith(beginning[: len(mark)]) for mark in marks)

    def write(self, name: str, arguments: str) -> str:
        """One call; `arguments` as JSON."""
        quoted = json.dumps(name, ensure_ascii=False)[1:-1] if self.before else name
        return (
            f"{self.opens}{self.before}{quoted}{self.between}{arguments}{self.after}{self.closes}"
        )

    def for_tools(self, tools: Sequence[Tool], *, reads_lone: bool = True) -> "ToolFormat":
        """The format with the schemas of `tools`, which say what is text and what is JSON;
        `reads_lone`: calls without marks are read too.
        """
        names = frozenset(tool.name for tool in tools) if reads_lone else frozenset()
        if self.style is None:
            return replace(self, names=names)
        found = {tool.name: tool.parameters.get("properties") for tool in tools}
        schemas = {name: own for name, own in found.items() if isinstance(own, Mapping)}
        return replace(self, names=names, style=self.style.with_schemas(schemas))

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens, and must be shown all the same."""
        own = () if self.style is None else self.style.marks
        return (self.first, self.opens, self.between, *self.others, self.closes, *own)


_NAMED = ('{"name": "', '", "arguments": ', "}")
HERMES = ToolFormat("<tool_call>\n", *_NAMED, "\n</tool_call>")
MISTRAL = ToolFormat("[TOOL_CALLS][", *_NAMED, "]", ", ")
MISTRAL_ARGS = ToolFormat("[TOOL_CALLS]", "", "[ARGS]", "", "")
GRANITE = ToolFormat("<|tool_call|>[", *_NAMED, "]", ", ")
COMMAND = ToolFormat(
    "<|START_ACTION|>[\n    ",
    f'{{"tool_call_id": {_NUMBER}, "tool_name": "',
    '", "parameters": ',
    "}",
    "\n]<|END_ACTION|>",
    ",\n    ",
)
GLM4 = ToolFormat("", "", "\n", "", "", "", head=_LINE)
_TYPED = "<|constrain|>json<|message|>"
HARMONY = ToolFormat(
    "to=functions.",
    "",
    f"<|channel|>commentary {_TYPED}",
    "",
    "",
    joint="",
    others=(f" {_TYPED}", "<|channel|>commentary json<|message|>"),
    head=_HARMONY,
)
_FUNCTION = ("<function=", ">\n", "</function>")
QWEN_CODER = ToolFormat(
    "<tool_call>\n", *_FUNCTION, "\n</tool_call>", style=TaggedArguments("\n", {})
)
SEED = ToolFormat(
    "<seed:tool_call>\n", *_FUNCTION, "\n</seed:tool_call>", style=TaggedArguments("", {})
)
# Read in both ways, but forced in that of the template, which writes the call again in the next
# prompt: it is then found in the cache.
GLM45 = ToolFormat("<tool_call>", "", "\n", "", "</tool_call>", style=KEYS_IN_LINES)
GLM47 = ToolFormat("<tool_call>", "", "", "", "</tool_call>", style=KEYS_INLINE)
GEMMA4 = ToolFormat("<|tool_call>", "call:", "{", "}", "<tool_call|>", style=QuotedArguments())
LLAMA = ToolFormat("", '{"name": "', '", "parameters": ', "}", "", "", first="<|python_tag|>")


def find_tool_format(template: str) -> ToolFormat | None:
    """How the family of a chat template calls tools; None if no known format is found."""
    if "tools" not in template:
        return None
    if "[TOOL_CALLS]" in template:
        return MISTRAL_ARGS if "[ARGS]" in template else MISTRAL
    if "<function=" in template and "<parameter=" in template:
        return SEED if "<seed:tool_call>" in template else QWEN_CODER
    # With <tool_sep>, it is Hunyuan's own way.
    if "<tool_call>" in template and "<arg_key>" in template and "<tool_sep>" not in template:
        return GLM47 if "</arg_key><arg_value>" in template else GLM45
    if "<|tool_call>call:" in template:
        return GEMMA4
    if "<|tool_call|>" in template:
        return GRANITE
    if "<|START_ACTION|>" in template:
        return COMMAND
    if "<|channel|>commentary " in template:
        return HARMONY
    if "<|observation|>" in template and "metadata" in template:
        return GLM4
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
    """What a model with `tools` may answer: calls whose arguments match the tools' schemas or,
    unless `way` is "required", a text; if `answer`, a JSON schema, is given, one that matches it.

    `as_lark` writes a literal text, special tokens by their ids. Raises: RequestError.
    """

    def lark(text: str) -> str:
        return as_lark(text) if text else ""

    rules = ["%llguidance {}", "TEXT: /(.|\\n)*/", 'NUMBER: /"[0-9]{1,4}"/']
    for i, tool in enumerate(tools):
        between = " | ".join(f"({lark(each)})" for each in (form.between, *form.others))
        literals = f"{lark_literal(tool.name)} ({between})"
        if form.is_line:
            # In one piece, so that it is as long as the text that may begin in the same way.
            literals = lark_literal(tool.name + form.between)
        if form.style is not None:
            literals = f"{as_lark(form.before)} {literals}"
        elif form.before:
            head = form.before + json.dumps(tool.name, ensure_ascii=False)[1:-1] + form.between
            # Piece by piece, as JSON is read: an answer in JSON may begin in the same way.
            pieces = re.findall(_JSON_PIECE, head)
            literals = " ".join(
                "NUMBER" if each == _NUMBER else lark_literal(each) for each in pieces
            )
        parameters = {"type": "object", **tool.parameters}
        for ours in (LOOSE, COMPACT):
            parameters.pop(ours, None)
        if not tool.strict:
            parameters[LOOSE] = True
        if parameters["type"] != "object":
            raise RequestError(
                f"the schema of {tool.name} must describe an object of arguments", param="tools"
            )
        arguments = _inline(parameters)
        if form.style is not None:
            arguments = f"arguments_{i}"
            rules += form.style.rules(arguments, parameters, as_lark)
        rules.append(f"tool_{i}: {literals} {arguments} {lark(form.after)}")
    if form.style is not None:
        rules += form.style.shared_rules(as_lark)
    rules.append("one: " + " | ".join(f"tool_{i}" for i in range(len(tools))))
    more = f"({lark(form.joint)} one)*" if form.joint and are_parallel else ""
    rules += [f"body: one {more} {lark(form.closes)}", f"call: {lark(form.opens)} body"]
    has_many = form.joint is None and are_parallel
    rules += ["calls: call (SPACE call)*", "SPACE: /\\n?/"] if has_many else ["calls: call"]
    if way == "required":
        rules.append("start: calls")
    elif answer is not None:
        schema = json.loads(answer.source)
        compact = {**schema, COMPACT: True} if isinstance(schema, dict) else schema
        rules += ["start: calls | answer", f"answer: {_inline(compact)}"]
    elif not form.opens:
        first = f"({lark(form.first)})?" if form.first else ""
        free = _NO_LINE if form.is_line else _NO_OBJECT
        rules += [f"start: {first} calls | FREE", f"FREE: {free}"]
    elif lark(form.opens).startswith("<["):  # a token of its own, which no text has
        rules.append("start: TEXT calls?")
    else:
        tag = form.opens.rstrip("\n")
        rules += [
            f"begun[lazy]: TEXT {lark(tag)}",
            f"begun_call: begun {lark(form.opens[len(tag) :])} body",
            f"start: begun_call{'*' if has_many else '?'} TEXT",
        ]
    return Grammar("calls", "\n".join(rules))


def _inline(schema: Any) -> str:
    return f"%json {json.dumps(schema, ensure_ascii=False)}"


class ToolCallSplitter:
    """Splits a growing answer into text and calls; what turns out not to be a call is text.

    Each character is read only a few times, however long the call that it belongs to.
    """

    def __init__(self, form: ToolFormat) -> None:
        self._form, self._lone = form, LoneCalls(form.names)
        self._tag = form.opens.rstrip("\n")
        # Text that may begin a tag; the call in progress, and the search for its end.
        self._held = ""
        self._call: list[str] = []
        self._end: EndOfCall | None = None
        # Without a tag: the beginning of the answer, and whether it is known not to be a call.
        self._beginning, self._is_said = "", False

    def push(self, piece: str) -> tuple[str, list[ToolCall]]:
        """The text and the calls that are certain now."""
        text, calls = self._push_marked(piece)
        said = self._lone.push(text)
        if calls:  # in marks, so nothing else is one
            said += self._lone.flush_text()
        return said, calls

    def _push_marked(self, piece: str) -> tuple[str, list[ToolCall]]:
        if not self._tag:
            return self._push_lone(piece), []
        said, calls, text = list[str](), list[ToolCall](), piece
        while True:
            if self._end is None:
                text = self._held + text
                place = text.find(self._tag)
                if place < 0:
                    keep = longest_overlap(text, self._tag)
                    self._held = text[len(text) - keep :]
                    return "".join((*said, text[: len(text) - keep])), calls
                said.append(text[:place])
                self._held, text = "", text[place:]
                self._end = self._make_end()
            end = self._end.find(text)
            if end < 0:
                self._call.append(text)
                return "".join(said), calls
            body = "".join((*self._call, text[:end]))
            self._call, self._end, text = [], None, text[end:]
            found = self._read(body)
            said += [] if found else [body]
            calls += found

    def flush(self, *, is_cut: bool = False) -> tuple[str, list[ToolCall]]:
        """The text and calls that were held back; call it when no more text comes. `is_cut`: the
        answer is not whole, and half a call, in marks or of an answer that can only be calls, is
        neither a call nor text.
        """
        call = "".join(self._call)
        calls = self._read(call) if call else []
        is_half = is_cut and (bool(self._tag) or self._form.is_forced)
        text = "" if calls or is_half else call
        text += "" if is_cut and self._form.is_forced else self._held
        self._held, self._call, self._end = "", [], None
        said = self._lone.push(text)
        if calls:
            return said + self._lone.flush_text(), calls
        rest, lone = self._lone.flush()
        return said + rest, [each for found in lone if (each := _call(*found, None)) is not None]

    def _push_lone(self, piece: str) -> str:
        """`push` for a family without a mark for calls: an answer that begins like a call is held
        back.
        """
        if self._is_said:
            return piece
        self._call.append(piece)
        if len(self._beginning) < _TELLING_CHARS:
            told = piece if self._beginning or self._form.is_line else piece.lstrip()
            self._beginning += told[:_TELLING_CHARS]
        if self._form.may_be_call(self._beginning):
            return ""
        self._is_said = True
        text, self._call = "".join(self._call), []
        return text

    def _make_end(self) -> EndOfCall:
        if self._form.style is not None:
            return self._form.style.end_of_call(self._form.closes)
        return _EndOfCall("" if self._form.joint is not None else self._form.closes)

    def _read(self, text: str) -> list[ToolCall]:
        if self._form.style is not None:
            found = self._form.style.read(text)
            call = None if found is None else _call(*found, None)
            return [] if call is None else [call]
        if self._form.before:
            return _read_objects(text)
        return _read_named(text, self._form.head)


class _EndOfCall(EndOfCall):
    """Arguments may hold the mark too, within a JSON string; outside of strings, it is not JSON. A
    string that holds a control character is not JSON either; the search continues as if it had
    ended there.
    """

    def __init__(self, mark: str) -> None:
        """`mark` may be empty, for a call that continues to the answer's end."""
        self._mark = mark.strip("\n")
        self._outside = re.compile(rf'["{{]|{re.escape(self._mark)}')
        self._is_object = self._is_text = self._is_escaped = False
        self._overlap = ""

    def find(self, piece: str) -> int:
        if not self._mark:
            return -1
        seen, at = self._overlap + piece, 0
        while at < len(seen):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = (_IN_TEXT if self._is_text else self._outside).search(seen, at)
            if found is None:
                break
            at = found.end()
            if found[0] == self._mark:
                return at - len(self._overlap)
            if self._is_text:
                self._is_escaped = found[0] == "\\"
                self._is_text = self._is_escaped
            else:
                self._is_object |= found[0] == "{"
                self._is_text = self._is_object and found[0] == '"'
        rest = "" if self._is_text else seen[at:]
        self._overlap = rest[len(rest) - longest_overlap(rest, self._mark) :]
        return -1


def _read_named(text: str, pattern: re.Pattern[str]) -> list[ToolCall]:
    """Calls that have their name, and maybe an id, before the arguments."""
    calls, place = list[ToolCall](), 0
    while (head := pattern.search(text, place)) is not None:
        place = head.end()
        try:
            arguments, place = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            continue
        is_object = isinstance(arguments, dict)
        call = _call(head["name"].strip(), arguments, head["id"]) if is_object else None
        calls += [] if call is None else [call]
    return calls


def _read_objects(text: str) -> list[ToolCall]:
    calls, place = list[ToolCall](), text.find("{")
    while place >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except (ValueError, RecursionError):
            return []
        found = read_call(value)
        call = None if found is None else _call(*found, value.get("id"))
        if call is None:
            return []
        calls.append(call)
        place = text.find("{", end)
    return calls


def _call(name: str, arguments: dict[str, Any], given: Any) -> ToolCall | None:
    """None if the arguments cannot be written as JSON: infinity or NaN."""
    try:
        written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
        written.encode()
    except UnicodeEncodeError:  # a lone surrogate can only be escaped
        written = json.dumps(arguments)
    except ValueError:
        return None
    # Nine letters and digits: Mistral's templates insist on that, and others accept it.
    own = "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
    is_usable = isinstance(given, str) and re.fullmatch("[A-Za-z0-9]{9}", given)
    return ToolCall(given if is_usable else own, name, written)
