"""The parts of an answer with tools, in order: thoughts, text, calls."""

from collections.abc import Iterator

from localllm.answer.completion import TextEvent
from localllm.server.choice import Choice
from localllm.text.tool_calls import ToolCall, ToolFormat


class AnswerParts:
    """Reads one answer, whose ending is that of `choice`."""

    def __init__(self, tools: ToolFormat | None) -> None:
        """`tools`: how the model writes calls, if the request has tools."""
        self.choice = Choice.of(tools)
        self.num_thinking = 0

    def push(self, event: TextEvent) -> Iterator[tuple[bool, str] | ToolCall]:
        """What an event brings: calls, and pieces of text, each with whether it is thoughts."""
        choice = self.choice
        choice.add(event)
        self.num_thinking += event.token is not None and bool(event.thinking)
        if event.thinking:
            yield True, event.thinking
        if choice.new_text:
            yield False, choice.new_text
        yield from choice.new_calls
