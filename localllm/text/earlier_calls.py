"""Earlier calls of tools in a conversation, for chat templates that do not write them.

SmolLM3's template reads an assistant's text alone; GLM-4's takes the name of a call as `metadata`,
its arguments as the text, and results in the role `observation`.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from localllm.text.tool_calls import GLM4, ToolFormat


def with_earlier_calls(
    messages: Sequence[Mapping[str, Any]], form: ToolFormat, template: str
) -> list[Mapping[str, Any]]:
    """`messages` as `template` can write them, with calls as `form` says. The templates of families
    whose arguments are no JSON write calls themselves.
    """
    if "tool_calls" in template or form.style is not None:
        return list(messages)
    return [each for message in messages for each in _written(message, form)]


def _written(message: Mapping[str, Any], form: ToolFormat) -> Iterator[Mapping[str, Any]]:
    calls = [each["function"] for each in message.get("tool_calls") or ()]
    text = message.get("content") or ""
    if form == GLM4:
        if message["role"] == "tool":
            yield {"role": "observation", "content": text}
            return
        if text or not calls:
            yield message
        for call in calls:
            yield {**message, "metadata": call["name"], "content": _as_json(call["arguments"])}
    elif calls:
        written = [form.write(call["name"], _as_json(call["arguments"])) for call in calls]
        yield {**message, "content": "\n".join([*([text] if text else []), *written])}
    else:
        yield message


def _as_json(arguments: Any) -> str:
    if isinstance(arguments, str):
        return arguments
    return json.dumps(arguments, ensure_ascii=False)
