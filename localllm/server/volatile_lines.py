"""Moves lines that change with every request behind the conversation, where the user asked for it.

Tokens behind a change depend on it and are computed again. A date or a status at the head of a
system prompt so costs the whole conversation, at every turn. The model reads it at the end instead:
that is another prompt, so nobody gets it who has not written a rule, and every answer says so.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.errors import RequestError
from localllm.text.prompt import ChatMessage

Rule = re.Pattern[str]
# Longer lines are no status; matching them could take long.
_MOST_CHARS = 2000
_HINT = "such as 'Today is .*'"


def parse_rule(text: str) -> Rule:
    """A regular expression for whole lines. Raises: RequestError."""
    try:
        rule = re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise RequestError(
            f"{text!r:.100} is not a valid regular expression: {error}",
            param="volatile",
            hint=_HINT,
        ) from error
    if rule.fullmatch(""):
        raise RequestError(f"{text!r:.100} matches empty lines", param="volatile", hint=_HINT)
    return rule


@dataclass(frozen=True, slots=True)
class Moved:
    """A conversation after its volatile lines were moved, and how many there were."""

    messages: list[ChatMessage]
    num_lines: int


def move_volatile_lines(messages: Sequence[ChatMessage], rules: Sequence[Rule]) -> Moved:
    """Take the lines of system messages that match a rule, and put them behind the last message.

    Lines stay where they are in a conversation that has no message but such, or that ends with a
    call.
    """
    if not rules or not messages or messages[-1]["role"] in ("system", "assistant"):
        return Moved(list(messages), 0)
    taken: list[str] = []
    kept = [_without(message, rules, taken) for message in messages]
    if not taken:
        return Moved(kept, 0)
    last = kept[-1]
    kept[-1] = {**last, "content": "\n".join([str(last["content"]), "", *taken])}
    return Moved(kept, len(taken))


def _without(message: ChatMessage, rules: Sequence[Rule], taken: list[str]) -> ChatMessage:
    if message["role"] != "system":
        return message
    stay: list[str] = []
    for line in str(message["content"]).split("\n"):
        is_volatile = len(line) <= _MOST_CHARS and any(rule.fullmatch(line) for rule in rules)
        (taken if is_volatile else stay).append(line)
    return {**message, "content": "\n".join(stay)}
