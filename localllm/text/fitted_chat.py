"""Fits conversations to a chat template: clients mean well, and so do templates, but they differ.

A conversation that the template takes stays as it is. Otherwise each rule changes what the template
refuses or leaves out (see TemplateManners), so that all that was said stands in the prompt, once
and in order. No text gets a role with more say than its own: system messages may become the user's.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from localllm.text.plain_messages import THOUGHT_NAMES, plain_messages
from localllm.text.prompt import ChatMessage
from localllm.text.template_manners import TemplateManners, Tools
from localllm.text.tool_schemas import (
    Types,
    plain_tool,
    told_tool,
    typed_tool,
    whole_tool,
    with_text_defaults,
)

Plain = dict[str, Any]
Rule = Callable[[Sequence[Plain], TemplateManners], list[Plain]]
# Others have a meaning that only their template knows.
_ROLES = frozenset({"system", "user", "assistant", "tool"})
_ID_CHARS = 9


@dataclass(frozen=True, slots=True)
class Fitted:
    """A conversation as a template takes it, and what was changed, for its client to know."""

    messages: Sequence[ChatMessage]
    tools: Tools | None
    changes: tuple[str, ...] = ()


def fit(messages: Sequence[ChatMessage], tools: Tools | None, manners: TemplateManners) -> Fitted:
    """Change what the template does not take."""
    fitted, changes = plain_messages(messages), list[str]()
    if fitted and all(each["role"] in _ROLES for each in fitted):
        fitted = _named(fitted)
        for change, rule in _RULES:
            before, fitted = fitted, rule(fitted, manners)
            if fitted != before:
                changes.append(change)
        fitted = [_in_form(each, manners) for each in fitted]
    described = _described(tools, manners)
    if tools and described != [plain_tool(each) for each in tools]:
        changes.append("the descriptions of tools are completed")
    return Fitted(fitted, described, tuple(changes))


# -- results of tools


def _named(messages: Sequence[Plain]) -> list[Plain]:
    """Calls have an identifier; results have it too, and the name of the tool."""
    named, names, unanswered = list[Plain](), dict[str, Any](), list[str]()
    for place, message in enumerate(messages):
        if "tool_calls" in message:
            calls = [
                {**call, "id": call.get("id") or f"call{place}of{number}"}
                for number, call in enumerate(message["tool_calls"])
            ]
            names |= {call["id"]: call.get("function", call).get("name") for call in calls}
            unanswered = [call["id"] for call in calls]
            message = {**message, "tool_calls": calls}
        elif message["role"] == "tool":
            call_id = message.get("tool_call_id") or next(iter(unanswered), None)
            unanswered = [each for each in unanswered if each != call_id]
            if call_id in names:
                message = {"name": names[call_id], **message, "tool_call_id": call_id}
        named.append(message)
    return named


def _results_behind_calls(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """Results stand directly behind their call. If they do not name it, they are in its order."""
    callers, own, others = dict[str, int](), dict[int, list[Plain]](), set[int]()
    for place, message in enumerate(messages):
        if "tool_calls" in message:
            own[place] = []
            callers |= dict.fromkeys((call["id"] for call in message["tool_calls"]), place)
        elif message["role"] == "tool" and message.get("tool_call_id") in callers:
            own[callers[message["tool_call_id"]]].append(message)
            others.add(place)
    if not others:
        return list(messages)
    ordered = list[Plain]()
    for place, message in enumerate(messages):
        if place in others:
            continue
        ordered.append(message)
        results = own.get(place, [])
        if len(results) > 1 and not manners.shows_ids:
            ids = [call["id"] for call in message["tool_calls"]]
            results = sorted(results, key=lambda each: ids.index(each["tool_call_id"]))
        ordered += results
    return ordered


def _results_as_user(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """Results that the template would refuse are the user's words."""
    said, ids = list(messages), frozenset[str]()
    for place, message in enumerate(messages):
        if message["role"] != "tool":
            ids = frozenset(call["id"] for call in message.get("tool_calls", ()))
            continue
        has_call = message.get("tool_call_id") in ids
        has_call |= manners.call_form is None and "tool_call_id" in message
        if not (manners.takes_results if has_call else manners.takes_lone_results):
            said[place] = {"role": "user", "content": message["content"]}
    return said


# -- calls of tools


def _calls_as_text(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """Calls that the template does not know are part of the text."""
    has_calls = any("tool_calls" in each for each in messages)
    if not has_calls or manners.call_form is not None:
        return list(messages)
    said = list[Plain]()
    for message in messages:
        text = dict(message)
        calls = text.pop("tool_calls", ())
        written = [manners.write_call(each["function"]) for each in calls if "function" in each]
        if written:
            text["content"] = "\n".join([*([text["content"]] if text["content"] else []), *written])
        said.append(text)
    return said


def _calls_apart(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """A text before calls, and each of several calls, is a message of its own."""
    apart, place = list[Plain](), 0
    while place < len(messages):
        message = messages[place]
        place += 1
        calls = message.get("tool_calls", ())
        if calls and message["content"] and not manners.takes_text_with_calls:
            apart.append({"role": "assistant", "content": message["content"]})
            message = {**message, "content": ""}
        if len(calls) < 2 or manners.takes_several_calls:
            apart.append(message)
            continue
        results = list[Plain]()
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        apart += _one_by_one(message, results)
    return apart


def _one_by_one(message: Plain, results: Sequence[Plain]) -> Iterator[Plain]:
    """A message for each call, and its results behind it."""
    left = list(results)
    for call in message["tool_calls"]:
        yield {**message, "tool_calls": [call]}
        yield from (each for each in left if each.get("tool_call_id") == call["id"])
        left = [each for each in left if each.get("tool_call_id") != call["id"]]
        message = {"role": "assistant", "content": ""}
    yield from left


def _arguments_as_objects(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """Arguments that are no object become one."""
    calls = [call for each in messages for call in each.get("tool_calls", ())]
    if not any(_has_text(call) for call in calls) or manners.takes_text_arguments:
        return list(messages)
    return [_changed_calls(each, _with_object) for each in messages]


def _has_text(call: Mapping[str, Any]) -> bool:
    return isinstance(call.get("function", {}).get("arguments"), str)


def _with_object(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if not _has_text(call):
        return call
    function = call["function"]
    return {**call, "function": {**function, "arguments": {"arguments": function["arguments"]}}}


# -- system messages


def _systems(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """System messages at the beginning are one message, or the user's where there are none."""
    count = _num_leading(messages)
    leading, rest = list(messages[:count]), messages[count:]
    if leading and not manners.takes_system:
        leading = [{**each, "role": "user"} for each in leading]
    elif count > 1 and not manners.takes_systems:
        leading = [_joined(leading)]
    return [*leading, *rest]


def _late_systems(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """System messages elsewhere become the user's, in their place."""
    count = _num_leading(messages)
    is_late = any(each["role"] == "system" for each in messages[count:])
    if not is_late or (manners.takes_system and manners.takes_late_systems):
        return list(messages)
    late = ({**each, "role": "user"} if each["role"] == "system" else each for each in messages)
    return [*messages[:count], *list(late)[count:]]


def _a_user(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """Somebody has asked: the last system message, or else the user says nothing."""
    if any(each["role"] == "user" for each in messages):
        return list(messages)
    count = _num_leading(messages)
    if count == len(messages):
        last = messages[-1] if manners.takes_only_system else {**messages[-1], "role": "user"}
        return [*messages[:-1], last]
    if manners.takes_no_user:
        return list(messages)
    return [*messages[:count], {"role": "user", "content": ""}, *messages[count:]]


def _num_leading(messages: Sequence[Plain]) -> int:
    roles = (place for place, each in enumerate(messages) if each["role"] != "system")
    return next(roles, len(messages))


# -- the order of roles


def _neighbours_joined(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """Neighbouring messages of one role are one message."""
    joined = list[Plain]()
    for message in messages:
        if joined and _may_join(joined[-1], message, manners) and not manners.takes_neighbours:
            joined[-1] = _joined([joined[-1], message])
        else:
            joined.append(message)
    return joined


def _may_join(first: Plain, second: Plain, manners: TemplateManners) -> bool:
    if first["role"] != second["role"] or first["role"] not in ("user", "assistant"):
        return False
    if "tool_calls" in first or not isinstance(first["content"], str):
        return False
    if "tool_calls" in second:
        return manners.takes_text_with_calls
    return isinstance(second["content"], str)


def _gaps_filled(messages: Sequence[Plain], manners: TemplateManners) -> list[Plain]:
    """User and assistant take turns, also around calls: one of them says nothing there."""
    filled, last, is_after_call = list[Plain](), "", False
    for message in messages:
        role = message["role"]
        if "tool_calls" in message or role == "tool":
            is_after_call = True
        elif role in ("user", "assistant"):
            other = "assistant" if role == "user" else "user"
            repeats = role == last and is_after_call and not manners.takes_user_after_call
            opens = not last and role == "assistant" and not manners.takes_assistant_first
            if repeats or opens:
                filled.append({"role": other, "content": ""})
            last, is_after_call = role, False
        filled.append(message)
    return filled


def _joined(messages: Sequence[Plain]) -> Plain:
    joined = {name: value for each in reversed(messages) for name, value in each.items()}
    for name in ("content", *THOUGHT_NAMES):
        said = [each[name] for each in messages if each.get(name)]
        if name in joined:
            joined[name] = "\n\n".join(said)
    return joined


# -- forms that say the same


def _in_form(message: Plain, manners: TemplateManners) -> Plain:
    """Calls, and the names of results, as the template wants them written."""
    if "tool_calls" in message:
        said, as_text = manners.call_form or ("", False)
        if as_text:
            message = _changed_calls(message, _with_text)
        if not manners.takes_any_id:
            message = _changed_calls(message, lambda call: {**call, "id": _short(call["id"])})
        if said is None and not message["content"]:
            message = {**message, "content": None}
    elif "tool_call_id" in message and not manners.takes_any_id:
        message = {**message, "tool_call_id": _short(message["tool_call_id"])}
    elif message["role"] == "tool" and not manners.takes_any_id:
        message = {**message, "tool_call_id": _short("")}
    return message


def _changed_calls(
    message: Plain, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> Plain:
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [change(call) for call in message["tool_calls"]]}


def _with_text(call: Mapping[str, Any]) -> Mapping[str, Any]:
    if _has_text(call) or "function" not in call:
        return call
    text = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return {**call, "function": {**call["function"], "arguments": text}}


def _short(name: str) -> str:
    """An identifier of nine letters and digits, the same each time."""
    if len(name) == _ID_CHARS and name.isascii() and name.isalnum():
        return name
    return hashlib.sha256(name.encode(errors="surrogatepass")).hexdigest()[:_ID_CHARS]


# -- tools


def _described(tools: Tools | None, manners: TemplateManners) -> Tools | None:
    """Tools with as much in their descriptions as the template reads."""
    if not tools:
        return manners.no_tools if tools is None else tools
    described: list[Mapping[str, Any]] = [plain_tool(each) for each in tools]
    if not manners.takes_bare_tools:
        described = [whole_tool(each) for each in described]
    if not manners.takes_bare_parameters:
        described = [told_tool(each) for each in described]
    if not (manners.takes_untyped and manners.takes_lists_of_types):
        types = Types(manners.takes_lists_of_types, manners.takes_no_type)
        described = [typed_tool(each, types) for each in described]
    if not manners.takes_defaults:
        described = [with_text_defaults(each) for each in described]
    return described


_RULES: Sequence[tuple[str, Rule]] = (
    ("results of tools stand behind their calls", _results_behind_calls),
    ("calls of tools are written as text", _calls_as_text),
    ("results of tools are the user's words", _results_as_user),
    ("arguments that are no object became one", _arguments_as_objects),
    ("texts and calls of one message are apart", _calls_apart),
    ("system messages at the beginning are one, or the user's", _systems),
    ("later system messages are the user's", _late_systems),
    ("an empty message of the user was added, or the system's is the user's", _a_user),
    ("neighbouring messages of one role are joined", _neighbours_joined),
    ("empty messages stand where a turn was missing", _gaps_filled),
)
