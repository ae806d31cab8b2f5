"""The parts of an answer with tools, in order: thoughts, text, calls."""

from collections.abc import Iterator

from localllm.answer.completion import TextEvent
from localllm.server.choice import Choice
from localllm.text.tool_calls import ToolCall, ToolFormat


class AnswerParts:
    """Reads one answer, whose ending is that of `choice`.

    Space before a call is not part of it: a client that sends it back would have the template write
    it twice, and everything behind it would be computed again.
    """

    def __init__(self, tools: ToolFormat | None) -> None:
        """`tools`: how the model writes calls, if the request has tools."""
        self.choice = Choice.of(tools)
        self.num_thinking = 0
        self._space = ""  # at the end of the text, until it is known what follows

    def push(self, event: TextEvent) -> Iterator[tuple[bool, str] | ToolCall]:
        """What an event brings: calls, and pieces of text, each with whether it is thoughts."""
        choice = self.choice
        choice.add(event)
        self.num_thinking += event.token is not None and bool(event.thinking)
        if event.thinking:
            yield True, event.thinking
        text = self._space + choice.new_text
        said = text.rstrip()
        self._space = text[len(said) :]
        if choice.ending is not None and not choice.calls:
            said = text
        if said:
            yield False, said
        yield from choice.new_calls
