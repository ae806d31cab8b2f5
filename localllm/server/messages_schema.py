"""The bodies of Anthropic's Messages API, every field of them bounded.

As in schema.py, a known field that is not supported is refused, and unknown ones are reported.
Source: Anthropic's API reference, "Create a Message" and "Count tokens in a Message", and the types
of its Python client, 2.13. temperature, top_p and top_k are of earlier versions.
"""

import json
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from localllm.server.body import Body, Name, WholeBody, never
from localllm.server.chat_asked import ChatAsked, ToolUse
from localllm.server.limits import LIMITS
from localllm.server.schema import Stop, TopK, TopP
from localllm.server.tools_schema import Parameters, ToolDefinition, ToolName
from localllm.text.grammar import Grammar
from localllm.text.plain_messages import plain_message
from localllm.text.prompt import ChatMessage, ThinkLevel

_NOT_TEXT = frozenset({"image", "document", "container_upload"})
_EFFORTS: dict[str, ThinkLevel] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
_CHOICES: dict[str, Literal["none", "auto", "required"]] = {
    "none": "none",
    "auto": "auto",
    "any": "required",
    "tool": "required",
}
# Budgets of thoughts up to these sizes are low and medium efforts: models know no budgets.
_LOW_BUDGET, _MEDIUM_BUDGET = 2048, 8192


class CacheControl(Body):
    """A mark: the prompt up to here is to be kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class Block(Body):
    """A part of a message."""

    cache_control: CacheControl | None = None


class TextBlock(Block):
    """Text."""

    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    """Thoughts in an earlier answer; the signature is not checked."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedBlock(Block):
    """Thoughts that another model's makers hide; no model here can read them."""

    type: Literal["redacted_thinking"]
    data: str


class ToolUseBlock(Block):
    """A call in an earlier answer."""

    type: Literal["tool_use"]
    id: Name
    name: ToolName
    input: dict[str, Any] | None = None


class ToolResultBlock(Block):
    """What a call gave."""

    type: Literal["tool_result"]
    tool_use_id: Name
    content: (
        str
        | Annotated[list[TextBlock], Field(max_length=LIMITS.content_parts, fail_fast=True)]
        | None
    ) = None
    is_error: bool | None = None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        return _refuse_what_is_no_text(value)


AnyBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]
Blocks = Annotated[list[AnyBlock], Field(max_length=LIMITS.content_parts, fail_fast=True)]
Texts = Annotated[list[TextBlock], Field(max_length=LIMITS.content_parts, fail_fast=True)]


def _refuse_what_is_no_text(value: Any) -> Any:
    for block in value if isinstance(value, list) else ():
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind in _NOT_TEXT:
            raise PydanticCustomError("unsupported_modality", "localllm reads only text")
    return value


class Message(Body):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Blocks | None

    @field_validator("content", mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        return _refuse_what_is_no_text(value)

    @model_validator(mode="after")
    def _blocks_fit_the_role(self) -> "Message":
        allowed = {
            "user": (TextBlock, ToolResultBlock),
            "assistant": (TextBlock, ThinkingBlock, RedactedBlock, ToolUseBlock),
            "system": (TextBlock,),
        }[self.role]
        for block in self.blocks:
            if not isinstance(block, allowed):
                raise ValueError(f"a {self.role} message cannot hold a {block.type} block")
        return self

    @property
    def blocks(self) -> list[AnyBlock]:
        """Its content in blocks."""
        if isinstance(self.content, list):
            return self.content
        return [TextBlock(type="text", text=self.content or "")]

    def for_template(self) -> Iterator[ChatMessage]:
        """As chat templates read it: each result of a tool is a message of its own."""
        if self.role == "assistant":
            yield self._answer()
            return
        texts: list[str] = []
        for block in self.blocks:
            if isinstance(block, TextBlock):
                texts.append(block.text)
            elif isinstance(block, ToolResultBlock):
                if texts:
                    yield {"role": self.role, "content": "\n".join(texts)}
                    texts = []
                content = _joined(block.content)
                said = f"Error: {content}" if block.is_error else content
                yield {"role": "tool", "content": said, "tool_call_id": block.tool_use_id}
        if texts:
            yield {"role": self.role, "content": "\n".join(texts)}

    def _answer(self) -> ChatMessage:
        blocks = self.blocks
        texts = [each.text for each in blocks if isinstance(each, TextBlock)]
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts := [each.thinking for each in blocks if isinstance(each, ThinkingBlock)]:
            message["reasoning_content"] = "\n".join(thoughts)
        if calls := [each for each in blocks if isinstance(each, ToolUseBlock)]:
            message["tool_calls"] = [
                {
                    "id": each.id,
                    "type": "function",
                    "function": {"name": each.name, "arguments": each.input or {}},
                }
                for each in calls
            ]
        return plain_message(message)


def _joined(content: str | list[TextBlock] | None) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content or ())


class ToolBody(Body):
    """A function that the client runs; tools that Anthropic runs are refused."""

    type: Literal["custom"] | None = None
    name: ToolName
    description: str | None = None
    input_schema: Parameters | None = None
    strict: bool | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_own(cls, value: Any) -> Any:
        kind = value.get("type") if isinstance(value, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(f"{kind[:60]} is a tool of Anthropic's; give a name and input_schema")
        return value


class ToolChoiceBody(Body):
    """Whether and what the answer calls."""

    type: Literal["auto", "any", "tool", "none"]
    name: ToolName | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _a_tool_has_a_name(self) -> "ToolChoiceBody":
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("name goes with the type tool")
        return self


class Thinking(Body):
    """Whether the model thinks first."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    display: Literal["summarized", "omitted"] | None = None


class JsonFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """The format of the answer, and how much to think about it."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Diagnostics(Body):
    """The answer whose prompt this one is compared with."""

    previous_message_id: Name | None = None


class CountRequest(WholeBody):
    """`POST /v1/messages/count_tokens`, and what messages have in common with it."""

    grammar_field: ClassVar[str] = "output_config"
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "service_tier", "inference_geo", "speed", "workspace_id"}
    )

    model: Name
    messages: Annotated[
        list[Message], Field(min_length=1, max_length=LIMITS.messages, fail_fast=True)
    ]
    system: str | Texts | None = None
    tools: Annotated[list[ToolBody], Field(max_length=LIMITS.tools, fail_fast=True)] | None = None
    tool_choice: ToolChoiceBody | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    diagnostics: Diagnostics | None = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> "CountRequest":
        tools = self._tool_use()
        if self._begun and (self._format is not None or tools.must_call):
            raise ValueError("an answer that has begun cannot have a format")
        return self

    def asked(self) -> ChatAsked:
        """The conversation that the body holds."""
        begun = self._begun
        system = [] if not self.system else [{"role": "system", "content": _joined(self.system)}]
        messages = self.messages[:-1] if begun else self.messages
        written = [list(message.for_template()) for message in messages]
        return ChatAsked(
            [*system, *chain.from_iterable(written)],
            self._tool_use(),
            self._think,
            begun,
            compares_with=self.compares_with,
            num_to_keep=self._num_to_keep(len(system), list(map(len, written))),
        )

    @property
    def _think(self) -> ThinkLevel:
        """Without a word about it there are no thoughts, as the API has it."""
        asked = self.thinking
        effort = None if self.output_config is None else self.output_config.effort
        if asked is None or asked.type == "disabled":
            return "off"
        if effort is not None:
            return _EFFORTS[effort]
        if asked.budget_tokens is None:
            return "on"
        is_low = asked.budget_tokens <= _LOW_BUDGET
        return "low" if is_low else "medium" if asked.budget_tokens <= _MEDIUM_BUDGET else "high"

    def _tool_use(self) -> ToolUse:
        tools = [
            ToolDefinition.of(
                name=tool.name,
                description=tool.description,
                parameters=tool.input_schema,
                strict=tool.strict,
            )
            for tool in self.tools or ()
        ]
        asked = self.tool_choice
        if asked is None:
            return ToolUse(tools)
        disables = asked.disable_parallel_tool_use
        are_parallel = None if disables is None else not disables
        return ToolUse(tools, _CHOICES[asked.type], asked.name, are_parallel)

    @property
    def _begun(self) -> str:
        """A last message of the assistant."""
        last = self.messages[-1]
        if last.role != "assistant" or any(not isinstance(b, TextBlock) for b in last.blocks):
            return ""
        return "\n".join(each.text for each in last.blocks if isinstance(each, TextBlock))

    @property
    def compares_with(self) -> str | None:
        """The answer whose prompt this one is compared with, if the client names one."""
        return None if self.diagnostics is None else self.diagnostics.previous_message_id

    def _num_to_keep(self, num_system: int, num_written: Sequence[int]) -> int:
        """Messages up to the last mark; `num_written`: how many each of ours is for a template."""
        if self.cache_control is not None:
            return num_system + sum(num_written)
        marked = [each.cache_control for each in self.tools or ()]
        marked += [each.cache_control for each in self.system or () if isinstance(each, TextBlock)]
        num_kept = num_system if any(marked) else 0
        for i, message in enumerate(self.messages[: len(num_written)], 1):
            if any(block.cache_control for block in message.blocks):
                num_kept = num_system + sum(num_written[:i])
        return num_kept

    def given(self) -> dict[str, Any]:
        """See Asks."""
        asked = self._format
        return {} if asked is None else {"grammar": Grammar.of_schema(asked.schema_)}

    @property
    def _format(self) -> JsonFormat | None:
        return None if self.output_config is None else self.output_config.format


# What Anthropic's own servers would do.
Theirs = Annotated[None, never("not supported", may_be_empty=True)]


class MessagesRequest(CountRequest):
    """`POST /v1/messages`; `max_tokens` of 0 only reads the prompt, into the cache."""

    max_tokens: Annotated[int, Field(ge=0, le=1 << 24)]
    stop_sequences: (
        Annotated[list[Stop], Field(max_length=LIMITS.stop_strings, fail_fast=True)] | None
    ) = None
    stream: bool | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None

    mcp_servers: Theirs = None
    container: Theirs = None

    def given(self) -> dict[str, Any]:
        stop = tuple(self.stop_sequences or ()) or None
        fields = self.sent("temperature", "top_p", "top_k", stop=stop)
        return {**super().given(), **fields, "max_tokens": max(1, self.max_tokens)}


def as_json(arguments: str) -> dict[str, Any]:
    """The arguments of a call; none if a model without grammar wrote something else."""
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
