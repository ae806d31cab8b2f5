"""What the events of a request add up to, whatever format it is sent in."""

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from localllm.answer.completion import TextEvent, TokenInfo
from localllm.server.earlier_prompts import Compared
from localllm.server.refusals import Refusal
from localllm.text.tool_calls import ToolCall, ToolCallSplitter, ToolFormat

Ending = Literal["stop", "length", "tool_calls"]
Part = Literal["thinking", "text"]
_ENDINGS: dict[str, Ending] = {"length": "length"}


@dataclass(slots=True)
class Usage:
    """Token counts of a request, over all its prompts and samples."""

    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    num_thinking: int = 0
    num_accepted: int = 0
    # The prompt beside the one before it, if there is one; and how many of its lines were moved.
    compared: Compared | None = None
    num_moved: int = 0

    def add(self, event: TextEvent) -> None:
        """Count an event's token."""
        if event.token is not None:
            self.num_completion += 1
            self.num_thinking += bool(event.thinking)
            self.num_accepted += event.token.is_draft

    def why(self) -> dict[str, Any]:
        """Why not all of the prompt was cached, in fields of our own; empty if there is nothing to
        tell.
        """
        found: dict[str, Any] = {}
        if self.compared is not None and self.compared.difference is not None:
            found |= self.compared.as_json(self.num_cached)
        if self.num_moved:
            found["moved_lines"] = self.num_moved
        return {"why": found} if found else {}


@dataclass(slots=True)
class Choice:
    """One answer so far; `new_text` and `new_calls` are what the newest event brought."""

    splitter: ToolCallSplitter | None
    # In pieces: a growing string would be copied with each event.
    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    new_text: str = ""
    new_calls: list[ToolCall] = field(default_factory=list)
    ending: Ending | None = None
    stop_string: str | None = None
    tokens: list[TokenInfo] = field(default_factory=list)
    _space: str = ""  # at the end of the text, until it is known what follows

    @classmethod
    def of(cls, tools: ToolFormat | None) -> "Choice":
        """An answer that has not begun; `tools`: how the model writes calls, if it has tools."""
        return cls(None if tools is None else ToolCallSplitter(tools))

    def add(self, event: TextEvent) -> None:
        """Add an event."""
        self.new_text, self.new_calls = event.text, []
        if self.splitter is not None:
            self._split(self.splitter, event)
        self.text.append(self.new_text)
        self.calls += self.new_calls
        self.thinking.append(event.thinking)
        if event.token is not None:
            self.tokens.append(event.token)
        if event.finish_reason is not None:
            self.ending = _ENDINGS.get(event.finish_reason, "stop")
            self.stop_string = event.stop_string
            if self.ending == "stop" and self.calls:
                self.ending = "tool_calls"

    def _split(self, splitter: ToolCallSplitter, event: TextEvent) -> None:
        """Split an event into text and calls.

        Space around calls is not text: a client that sends it back would have the template write it
        twice, and everything behind it would be computed again.
        """
        text, self.new_calls = splitter.push(event.text)
        if event.finish_reason is not None:
            rest, calls = splitter.flush(is_cut=event.finish_reason == "length")
            text, self.new_calls = text + rest, self.new_calls + calls
        text = self._space + text
        has_ended = event.finish_reason is not None and not (self.calls or self.new_calls)
        self.new_text = text if has_ended else text.rstrip()
        self._space = text[len(self.new_text) :]
        if self.new_calls:
            self._space = ""


@dataclass(frozen=True, slots=True)
class Frame:
    """A server-sent event: an object or a word, and the event's name in formats that have one."""

    data: dict[str, Any] | str
    name: str | None = None


class AnswerWriter(Protocol):
    """Writes the answer to one request in the format of an API.

    `usage`: what was counted so far; `name`: the answer's identifier.
    """

    usage: Usage
    name: str

    def add(self, index: int, event: TextEvent) -> None:
        """Add an event of choice `index`."""

    def whole(self) -> dict[str, Any]:
        """The answer that is not streamed."""

    def begin(self) -> Iterable[Frame]:
        """The frames that come before any token."""

    def frames(self, index: int, event: TextEvent) -> Iterable[Frame]:
        """The frames of one event; call `add` with it first."""

    def end(self) -> Iterable[Frame]:
        """The frames behind the last event."""

    def cut(self) -> Iterable[Frame]:
        """The last frames of an answer that will not continue, since the server ends."""
        return self.failed(Refusal(503, "the server ends"))

    def failed(self, refusal: Refusal) -> Iterable[Frame]:
        """The last frames of an answer that an error ends."""


class PartsWriter(AnswerWriter):
    """Writes one answer as parts, one behind the other: thoughts, text and calls."""

    def __init__(self, tools: ToolFormat | None) -> None:
        """`tools`: how the model writes calls, if the request has tools."""
        self.usage = Usage()
        self._choice = Choice.of(tools)
        self._open: Part | None = None
        self._pieces: list[str] = []  # of the open part

    def add(self, index: int, event: TextEvent) -> None:
        self.usage.add(event)
        choice = self._choice
        choice.add(event)
        if event.thinking:
            self._say("thinking", event.thinking)
        if choice.new_text:
            self._say("text", choice.new_text)
        for call in choice.new_calls:
            self._call(call)
        if choice.ending is not None:
            self._close(is_cut=choice.ending == "length")

    @abstractmethod
    def _say(self, part: Part, piece: str) -> None: ...

    @abstractmethod
    def _call(self, call: ToolCall) -> None: ...

    @abstractmethod
    def _close(self, *, is_cut: bool = False) -> None:
        """Close the open part, if there is one."""
