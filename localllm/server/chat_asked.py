"""What a client asks a model to answer: every API's body is read into one `ChatAsked`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.server.tools_schema import ToolDefinition
from localllm.text.prompt import ChatMessage, Conversation, ThinkLevel
from localllm.text.tool_calls import Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request, and how its answer may use them.

    `name`: of the only one that may be called; `are_parallel`: whether there may be several calls,
    None: as many as the model makes by itself. Raises: ValueError for what does not go together.
    """

    tools: Sequence[ToolDefinition] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    name: str | None = None
    are_parallel: bool | None = None

    def __post_init__(self) -> None:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        if self.must_call and not names:
            raise ValueError("tool_choice needs tools")
        if self.name is not None and self.name not in names:
            raise ValueError("tool_choice names none of the tools")

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.choice == "required"

    @property
    def makes_several(self) -> bool:
        """Whether the answer may be several calls. A model that must call does not end by itself:
        it makes one, unless the client wants several.
        """
        return self.are_parallel is True if self.must_call else self.are_parallel is not False

    @property
    def callable(self) -> list[Tool]:
        """The tools that this answer may call."""
        found = (each.function for each in self._callable())
        return [Tool(each.name, each.parameters or {}, bool(each.strict)) for each in found]

    def for_template(self) -> list[dict[str, Any]] | None:
        """Those as chat templates read them; None without any."""
        hidden = {"function": {"strict"}}  # of the server's work, not the model's
        found = self._callable()
        return [each.model_dump(exclude_none=True, exclude=hidden) for each in found] or None

    def _callable(self) -> list[ToolDefinition]:
        if self.choice == "none":
            return []
        return [each for each in self.tools if self.name in (None, each.function.name)]


@dataclass(frozen=True, slots=True)
class ChatAsked:
    """A conversation to answer: its messages, without an answer that has `begun` and is to go on.

    `variables`: of the chat template, besides those that the server sets; `compares_with`: the
    answer whose prompt this one is compared with, if the client names one; `num_to_keep`: messages
    at the beginning that the cache should keep for longer than others.
    """

    messages: Sequence[ChatMessage]
    tools: ToolUse
    think: ThinkLevel | None
    begun: str = ""
    variables: Mapping[str, Any] = field(default_factory=dict)
    compares_with: str | None = None
    num_to_keep: int = 0

    @property
    def conversation(self) -> Conversation:
        """As the model is asked."""
        tools = self.tools.for_template()
        return Conversation(self.messages, tools, self.think, variables=self.variables)
