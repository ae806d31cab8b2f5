"""A tool call that is written as a JSON object, in each of the ways that models have for it."""

import json
from typing import Any

# Of the name, of the arguments, and others that say nothing. Sources: the templates of Qwen2.5 and
# Hermes ("arguments"), Llama 3 ("parameters") and Command R ("tool_name"); OpenAI's API reference
# ("function", with its arguments as a string).
_NAMES = ("name", "tool_name")
_ARGUMENTS = ("arguments", "parameters")
CALL_KEYS = (*_NAMES, *_ARGUMENTS, "function", "type", "id", "tool_call_id", "call_id")


def read_call(value: Any) -> tuple[str, dict[str, Any]] | None:
    """The name of the tool and the arguments of a call; None if `value` is no call."""
    if not isinstance(value, dict):
        return None
    inner = value.get("function")
    if isinstance(inner, dict):
        return read_call(inner)
    name = next((value[key] for key in _NAMES if key in value), inner)
    given = [value[key] for key in _ARGUMENTS if key in value]
    if not isinstance(name, str) or not given:
        return None
    arguments = given[0]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            return None
    if arguments is None:
        arguments = {}
    return (name, arguments) if isinstance(arguments, dict) else None
