"""Reads the messages that clients send, in all their forms, as the plain ones that templates know.

A plain message has a role, a text, thoughts under every name that templates use, and calls whose
arguments are objects. What is plain already stays as it is.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from localllm.text.prompt import ChatMessage

# Names of a message's thoughts: DeepSeek's, that of vLLM 0.16 and OpenRouter, and gpt-oss'.
THOUGHT_NAMES = ("reasoning_content", "reasoning", "thinking")
# Kinds of content parts, each with the fields that hold its text.
TEXT_PARTS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "input_text": ("text",),
    "output_text": ("text",),
    "refusal": ("refusal", "text"),
}
THOUGHT_PARTS: Mapping[str, tuple[str, ...]] = {
    "thinking": ("thinking", "text"),
    "reasoning": ("reasoning", "text", "content", "summary"),
    "reasoning_text": ("text",),
    "summary_text": ("text",),
}
# Of thoughts that only their makers can read.
HIDDEN_PARTS = frozenset({"redacted_thinking", "reasoning.encrypted"})


def plain_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """Messages as templates read them."""
    return [plain_message(each) for each in messages]


def plain_message(message: ChatMessage) -> dict[str, Any]:
    """A message as templates read it."""
    plain = {name: value for name, value in message.items() if value is not None}
    plain["role"] = "system" if message.get("role") == "developer" else message.get("role")
    plain["content"], thoughts = read_content(message.get("content"))
    refusal = plain.pop("refusal", None)
    plain["content"] = plain["content"] or refusal or ""
    given = (message[name] for name in THOUGHT_NAMES if isinstance(message.get(name), str))
    named = max(given, key=len, default=None)
    if not named:
        named = thoughts or _details(message.get("reasoning_details")) or named
    for name in THOUGHT_NAMES:
        plain.pop(name, None)
        if named is not None:
            plain[name] = named
    calls = plain.pop("tool_calls", None)
    if calls:
        plain["tool_calls"] = [_plain_call(each) for each in calls]
    return plain


def read_content(content: Any) -> tuple[Any, str]:
    """The text of a content in parts, and the thoughts in it; a content with parts of other kinds,
    such as images, stays as it is.
    """
    if content is None:
        return "", ""
    if isinstance(content, str) or not isinstance(content, Sequence):
        return content, ""
    texts, thoughts = list[str](), list[str]()
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else "text"
        if kind in TEXT_PARTS:
            texts.append(_text_of(part, TEXT_PARTS[kind]))
        elif kind in THOUGHT_PARTS:
            thoughts.append(_text_of(part, THOUGHT_PARTS[kind]))
        elif kind not in HIDDEN_PARTS:
            return content, ""
    return "\n".join(texts), "\n".join(each for each in thoughts if each)


def plain_arguments(arguments: Any) -> Any:
    """The arguments of a call as an object; what is none, or broken, stays as it is."""
    found = arguments
    for _ in range(2):  # some clients write JSON within JSON
        if isinstance(found, str):
            try:
                found = json.loads(found) if found.strip() else {}
            except (ValueError, RecursionError):
                return arguments
    if found is None:
        return {}
    return found if isinstance(found, Mapping) else arguments


def _text_of(part: Any, names: Sequence[str]) -> str:
    """A part's text, which may be a list of parts in turn."""
    if isinstance(part, str):
        return part
    for name in names:
        value = part.get(name)
        if isinstance(value, str):
            return value
        if isinstance(value, list):
            inner = [each for each in value if isinstance(each, Mapping | str)]
            return "\n".join(_text_of(each, ("text",)) for each in inner)
    return ""


def _details(details: Any) -> str:
    """The thoughts in OpenRouter's `reasoning_details`."""
    parts = [each for each in details or () if isinstance(each, Mapping)]
    found = (_text_of(each, ("text", "summary")) for each in parts)
    return "\n".join(each for each in found if each)


def _plain_call(call: Any) -> Any:
    """A call whose arguments are an object, if they can be read as one."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    arguments = plain_arguments(function.get("arguments"))
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}
