"""What a chat template takes, asked of the template itself with short conversations.

Templates differ in the conversations that they refuse, and some leave out what they do not expect.
Each question is a conversation whose texts can be found again: the template takes it if all of them
stand in the prompt once, in order. It is asked when a conversation first depends on it.
"""

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

from localllm.errors import TemplateError
from localllm.text.prompt import ChatMessage
from localllm.text.template_sandbox import LimitError
from localllm.text.tool_calls import ToolFormat

Tools = Sequence[Mapping[str, Any]]
Render = Callable[[Sequence[ChatMessage], Tools | None], str]

_MARK = re.compile(r"q7[a-z]+7q")
_SHORT_ID, _LONG_ID = "w8w8w8w80", "call_w8w8w8w8w8w8w8"
# Of processor time, for all questions to a template. Some forty take 0.1 s.
_ASKING_S = 1.0
_LONGEST = 3
_TEXT: Mapping[str, Any] = {"type": "string", "description": "A text."}


def _said(role: str, name: str) -> dict[str, Any]:
    return {"role": role, "content": f"q7{name}7q"}


_user, _system, _assistant = (partial(_said, role) for role in ("user", "system", "assistant"))


def _calls(*names: str, said: str | None = "", as_text: bool = False) -> dict[str, Any]:
    calls = []
    for place, name in enumerate(names):
        arguments: Any = {"zone": f"q7{name}7q"}
        written = json.dumps(arguments) if as_text else arguments
        function = {"name": "clock", "arguments": written}
        calls.append({"id": f"{_SHORT_ID[:-1]}{place}", "type": "function", "function": function})
    return {"role": "assistant", "content": said, "tool_calls": calls}


def _result(name: str, place: int = 0) -> dict[str, Any]:
    found = {"tool_call_id": f"{_SHORT_ID[:-1]}{place}", "name": "clock"}
    return {**_said("tool", name), **found}


def _tool(parameters: Mapping[str, Any] | None, **more: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": "clock", **more, **given}}


CLOCK = _tool(
    {"type": "object", "properties": {"zone": _TEXT}, "required": ["zone"]}, description="The time."
)


def _typed(schema: Mapping[str, Any]) -> dict[str, Any]:
    described = {"description": "A text.", **schema}
    return _tool(
        {"type": "object", "properties": {"zone": described}, "required": []}, description="A time."
    )


def _takes(*messages: ChatMessage) -> "cached_property[bool]":
    """Whether a template takes a conversation."""
    return cached_property(lambda manners: bool(manners.takes(*messages)))


def _takes_tools(*tools: Mapping[str, Any]) -> "cached_property[bool]":
    """Whether a template takes these descriptions of tools, each by itself."""
    return cached_property(lambda manners: bool(manners.takes_tools(*tools)))


class TemplateManners:
    """Answers questions about one template, with tools or without; see the module."""

    def __init__(self, render: Render, form: ToolFormat | None, *, has_tools: bool) -> None:
        """`form`: how its family writes calls, if that is known."""
        self._render_with, self._form = render, form
        self._has_tools = has_tools
        self._costs_s: list[float] = []

    def write_call(self, function: Mapping[str, Any]) -> str:
        """A call as text, for a template that knows none."""
        name, arguments = str(function.get("name")), function.get("arguments")
        written = json.dumps(arguments, ensure_ascii=False)
        if self._form is not None and self._form.style is None:
            return self._form.write(name, written)
        return json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)

    # -- system messages: at the beginning, and that it stays there

    takes_system = _takes(_system("a"), _user("b"), _assistant("c"), _user("d"))
    # Several of them there.
    takes_systems = _takes(_system("a"), _system("b"), _user("c"))
    # Anywhere else, and that they stay there.
    takes_late_systems = _takes(
        _user("a"), _system("b"), _assistant("c"), _system("d"), _user("e"), _system("f")
    )
    takes_only_system = _takes(_system("a"))

    # -- the order of roles: a conversation in which the user says nothing

    takes_no_user = _takes(_assistant("a"))
    # An assistant who speaks first.
    takes_assistant_first = _takes(_assistant("a"), _user("b"))
    # Neighbouring messages of one role.
    takes_neighbours = _takes(_user("a"), _user("b"), _assistant("c"), _assistant("d"), _user("e"))

    @cached_property
    def takes_user_after_call(self) -> bool:
        """A user who speaks where an answer is due: after a call, or its result."""
        calls = self._own_calls("b"), self._own_calls("e")
        return self.takes(_user("a"), calls[0], _result("c"), _user("d"), calls[1], _user("f"))

    # -- calls of tools

    @cached_property
    def call_form(self) -> tuple[str | None, bool] | None:
        """The content of a message with calls, and whether their arguments are text; None: calls
        are refused, or left out.
        """
        for said in ("", None):
            for as_text in (False, True):
                asked = [_user("a"), _calls("b", said=said, as_text=as_text)]
                if self.takes(*asked):
                    return said, as_text
        return None

    @cached_property
    def takes_text_arguments(self) -> bool:
        """Arguments of a call that are a text."""
        said, _ = self.call_form or ("", False)
        return self.takes(_user("a"), _calls("b", said=said, as_text=True))

    @cached_property
    def takes_results(self) -> bool:
        """Results of tools behind their calls."""
        return self.takes(_user("a"), self._own_calls("b"), _result("c"))

    # Results without a call.
    takes_lone_results = _takes(_user("a"), _result("b"), _assistant("c"), _result("d"), _user("e"))

    @cached_property
    def takes_several_calls(self) -> bool:
        """Several calls in one message."""
        return self.takes(_user("a"), self._own_calls("b", "c"), _result("d"), _result("e", 1))

    @cached_property
    def takes_text_with_calls(self) -> bool:
        """A text in a message with calls, before them or behind."""
        if self.call_form is None or self.call_form[0] is None:
            return False
        both = {**self._own_calls("c"), "content": "q7b7q"}
        asked = [_user("a"), both, _result("d"), _assistant("e")]
        is_there = sorted(self._marks_in(asked)) == sorted(_marks(asked))
        return is_there or self._is_unknown

    @cached_property
    def takes_any_id(self) -> bool:
        """Any identifier of a call; otherwise it has nine letters and digits."""
        call, result = self._own_calls("b"), {**_result("c"), "tool_call_id": _LONG_ID}
        if "tool_calls" in call:
            call["tool_calls"][0]["id"] = _LONG_ID
        return self.takes(_user("a"), call, result)

    @cached_property
    def shows_ids(self) -> bool:
        """Whether each result says which call it belongs to."""
        asked = [_user("a"), self._own_calls("b"), _result("c")]
        return self._rendered(asked, self._tools).count(asked[2]["tool_call_id"]) > 1

    # -- descriptions of tools

    @cached_property
    def no_tools(self) -> Tools | None:
        """What stands for no tools: usually nothing, but an empty list for a template that loops
        over it in any case.
        """
        asked = [_user("a")]
        return [] if self._rendered(asked, []) and not self._rendered(asked, None) else None

    # Tools without a description, or without parameters.
    takes_bare_tools = _takes_tools(_tool(None), _tool({}), _tool({"type": "object"}))
    # Parameters of which nothing is said but the type.
    takes_bare_parameters = _takes_tools(
        _tool({"type": "object", "properties": {"zone": {"type": "string"}}}, description="A time.")
    )

    @cached_property
    def takes_untyped(self) -> bool:
        """Parameters without a type. A template that writes whole schemas takes them; one that
        picks out the types does not.
        """
        option = {"type": "string", "title": "q7title7q"}
        options = {"description": "A text.", "anyOf": [option, {"type": "null"}]}
        text = self._rendered([_user("a")], [_typed(options)])
        others: list[dict[str, Any]] = [{"enum": ["x"]}, {"$ref": "#/$defs/x"}, {"const": 1}, {}]
        others += [{"type": "array", "items": each} for each in ({}, {"enum": ["x"]})]
        others += [{"type": "object", "properties": {"inner": {}}}]
        if self._is_unknown:
            return True
        return "q7title7q" in text and self.takes_tools(*[_typed(each) for each in others])

    # A parameter that may be anything.
    takes_no_type = _takes_tools(_typed({}))

    @cached_property
    def takes_lists_of_types(self) -> bool:
        """Parameters that have a list of types."""
        text = self._rendered([_user("a")], [_typed({"type": ["string", "null"]})])
        # As Python prints a list.
        return (bool(text) and "['" not in text) or self._is_unknown

    # Parameters whose defaults are numbers.
    takes_defaults = _takes_tools(_typed({"type": "integer", "enum": [1, 2], "default": 1}))

    def _own_calls(self, *names: str) -> dict[str, Any]:
        """Calls as this template takes them, which may be as text."""
        if self.call_form is None:
            return {"role": "assistant", "content": " ".join(f"q7{name}7q" for name in names)}
        said, as_text = self.call_form
        return _calls(*names, said=said, as_text=as_text)

    @property
    def _is_unknown(self) -> bool:
        """Whether nothing can be learned: the template does not even show what a user says, or it
        takes too long.
        """
        return self._is_slow or not self._is_clear

    @property
    def _is_slow(self) -> bool:
        """Whether its questions take too long together, but for the few that took longest: these
        wait for the compiler or a collection of garbage, and the answers must not depend on that.
        """
        return sum(sorted(self._costs_s)[:-_LONGEST]) > _ASKING_S

    @cached_property
    def _is_clear(self) -> bool:
        return self._marks_in([_user("a")]) == ["q7a7q"]

    def takes(self, *messages: ChatMessage) -> bool:
        """Whether all that is said stands in the prompt, once and in order."""
        return self._marks_in(messages) == _marks(messages) or self._is_unknown

    def takes_tools(self, *tools: Mapping[str, Any]) -> bool:
        """Whether the template describes each of these tools beside another one."""
        taken = (self._rendered([_user("a")], [CLOCK, tool]) for tool in tools)
        return all(taken) or self._is_unknown

    def _marks_in(self, messages: Sequence[ChatMessage]) -> list[str]:
        return _MARK.findall(self._rendered(messages, self._tools))

    @property
    def _tools(self) -> Tools | None:
        return [CLOCK] if self._has_tools else self.no_tools

    def _rendered(self, messages: Sequence[ChatMessage], tools: Tools | None) -> str:
        """The prompt; empty if the template refuses. Raises: TemplateError if it was stopped, which
        is no answer: a busy machine stops what it does not stop the next time.
        """
        if self._is_slow:
            return ""
        started = time.thread_time()
        try:
            return self._render_with(messages, tools)
        except TemplateError as error:
            if isinstance(error.__cause__, LimitError):
                raise
            return ""
        finally:
            self._costs_s.append(time.thread_time() - started)


def _marks(messages: Sequence[ChatMessage]) -> list[str]:
    return _MARK.findall(json.dumps(messages))
