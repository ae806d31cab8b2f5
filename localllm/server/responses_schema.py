"""The bodies of OpenAI's Responses API, every field of them bounded.

As in schema.py, a known field that is not supported is refused, and unknown ones are reported.
Source: OpenAI's API reference, "Create a response", and the types of its Python client, 3.57.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    TypeAdapter,
    model_validator,
)

from localllm.server.body import Body, Name, WholeBody, never
from localllm.server.body_reader import check_arguments
from localllm.server.chat_asked import ChatAsked, ToolUse
from localllm.server.forms_schema import JsonObjectFormat, TextFormat
from localllm.server.limits import LIMITS
from localllm.server.schema import (
    EFFORTS,
    Arguments,
    Content,
    ContentPart,
    MaxTokens,
    Parts,
    TopP,
    at_most,
)
from localllm.server.tools_schema import Parameters, ToolDefinition, ToolName
from localllm.text.grammar import Grammar
from localllm.text.plain_messages import plain_messages, read_content
from localllm.text.prompt import ChatMessage


def _joined(content: str | Sequence[ContentPart] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    text, thoughts = read_content([part.model_dump() for part in content])
    return str(text or thoughts)


class InputItem(Body):
    """A piece of a conversation."""

    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"id", "status", "phase", "summary", "encrypted_content"}
    )

    def as_stored(self) -> dict[str, Any]:
        """As the API lists it."""
        return self.model_dump(exclude_none=True)


class MessageItem(InputItem):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content | None = None

    def as_stored(self) -> dict[str, Any]:
        """See InputItem: its content is always a list."""
        kind = "output_text" if self.role == "assistant" else "input_text"
        parts = self.content or ""
        if isinstance(parts, str):
            content = [{"type": kind, "text": parts}]
            return {"type": "message", "role": self.role, "content": content}
        content = [part.model_dump(exclude_unset=True) for part in parts]
        return {"type": "message", "role": self.role, "content": content}


class CallItem(InputItem):
    """A call in an earlier answer; `arguments` is JSON."""

    type: Literal["function_call"]
    call_id: Name
    name: ToolName
    arguments: Arguments = "{}"

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.call_id, "type": "function", "function": function}


class OutputItem(InputItem):
    """What a call gave."""

    type: Literal["function_call_output"]
    call_id: Name
    output: Content | None = None


class ReasoningItem(InputItem):
    """Thoughts in an earlier answer."""

    type: Literal["reasoning"]
    content: Content | None = None
    summary: Parts | None = None

    @property
    def text(self) -> str:
        """The thoughts, or what is told of them."""
        return _joined(self.content) or _joined(self.summary)


def _kind_of(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "")
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[OutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(
        _kind_of,
        custom_error_type="item",
        custom_error_message="must be a message, function_call, function_call_output or reasoning",
    ),
]
Items = Annotated[list[Item], Field(min_length=1, max_length=LIMITS.messages, fail_fast=True)]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class FunctionTool(Body):
    """A function that the client runs."""

    type: Literal["function"]
    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class OtherTool(Body):
    """A tool that OpenAI's servers run, or of a kind of its own; the model is not told of it."""

    model_config = ConfigDict(extra="ignore")

    type: Annotated[str, Field(max_length=64)]


AnyTool = Annotated[
    Annotated[FunctionTool, Tag("function")] | Annotated[OtherTool, Tag("other")],
    Discriminator(lambda value: "function" if _kind_of(value) == "function" else "other"),
]


class ChosenFunction(Body):
    """The one function that must be called."""

    type: Literal["function"]
    name: ToolName


class SchemaFormat(Body):
    """JSON that matches a schema; it is enforced with or without `strict`."""

    type: Literal["json_schema"]
    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None

    def form(self) -> Grammar:
        """What is asked for. Raises: RequestError."""
        return Grammar.of_schema(self.schema_)


class TextConfig(Body):
    """The format of the answer's text; `verbosity` has no effect."""

    format: (
        Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None
    ) = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Reasoning(Body):
    """How much to think; there are no summaries of thoughts, since they are sent whole."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class CacheOptions(Body):
    """What the cache is compared with."""

    comparison_response_id: Name | None = None


# What the conversation would be instead.
NotItems = Annotated[None, never("not supported; use input and previous_response_id")]


class InputRequest(WholeBody):
    """`POST /v1/responses/input_tokens`, and what responses have in common with it."""

    grammar_field: ClassVar[str] = "text"
    HARMLESS: ClassVar[frozenset[str]] = frozenset(
        {"safety_identifier", "service_tier", "user", "prompt_cache_retention"}
    )

    model: Name | None = None
    input: Annotated[
        Annotated[str, Tag("text")] | Annotated[Items, Tag("items")],
        Discriminator(lambda value: "text" if isinstance(value, str) else "items"),
    ]
    instructions: str | None = None
    previous_response_id: Name | None = None
    tools: Annotated[list[AnyTool], Field(max_length=LIMITS.tools, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextConfig | None = None
    truncation: Literal["disabled"] | None = None

    _earlier: list[Item] = PrivateAttr(default_factory=list)

    conversation: NotItems = None
    prompt: NotItems = None

    @model_validator(mode="after")
    def _fields_go_together(self) -> "InputRequest":
        calls = (each for each in self.items if isinstance(each, CallItem))
        check_arguments(call.arguments for call in calls)
        self._tool_use()
        return self

    @property
    def unknown(self) -> list[str]:
        """See WholeBody; tools that the model is not told of are among them."""
        others = {tool.type for tool in self.tools or () if isinstance(tool, OtherTool)}
        return [*super().unknown, *(f"tools.{kind}" for kind in sorted(others))]

    @property
    def functions(self) -> list[FunctionTool]:
        """The tools that the model is told of."""
        return [tool for tool in self.tools or () if isinstance(tool, FunctionTool)]

    @property
    def items(self) -> list[Item]:
        """The input as items."""
        if isinstance(self.input, list):
            return self.input
        return [MessageItem(role="user", content=self.input)]

    def asked(self) -> ChatAsked:
        """The conversation that the body holds, behind what it continues from."""
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        effort = None if self.reasoning is None else self.reasoning.effort
        return ChatAsked(
            [*system, *messages_of([*self._earlier, *self.items])],
            self._tool_use(),
            None if effort is None else EFFORTS[effort],
            compares_with=self.asked_to_compare or self.previous_response_id,
        )

    @property
    def asked_to_compare(self) -> str | None:
        """The response that the client wants this one's prompt to be compared with."""
        return None

    def _tool_use(self) -> ToolUse:
        tools = [ToolDefinition.of(**tool.model_dump(exclude={"type"})) for tool in self.functions]
        choice, are_parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, ChosenFunction):
            return ToolUse(tools, "required", choice.name, are_parallel)
        return ToolUse(tools, choice or "auto", None, are_parallel)

    def given(self) -> dict[str, Any]:
        """See Asks."""
        asked = self.text.format if self.text is not None else None
        form = asked.form() if asked is not None else None
        return {} if form is None else {"grammar": form}

    def continue_from(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Put `items` before the input: those of earlier requests, and of the answers to them."""
        self._earlier = ITEMS.validate_python(list(items))


class ResponseRequest(InputRequest):
    """`POST /v1/responses`"""

    max_output_tokens: MaxTokens = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    stream: bool | None = None
    store: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16),
            at_most(16),
        ]
        | None
    ) = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: CacheOptions | None = None
    # Of what can be included, answers here have only thoughts, and those are always there.
    include: (
        Annotated[list[Literal["reasoning.encrypted_content"]], Field(max_length=8, fail_fast=True)]
        | None
    ) = None
    background: Literal[False] | None = None

    @property
    def asked_to_compare(self) -> str | None:
        options = self.prompt_cache_options
        return None if options is None else options.comparison_response_id

    def given(self) -> dict[str, Any]:
        most = self.max_output_tokens
        return super().given() | self.sent("temperature", "top_p", max_tokens=most)


def messages_of(items: Iterable[Item]) -> list[ChatMessage]:
    """Items as chat templates read them: thoughts, text and calls of an answer are one message."""
    messages: list[dict[str, Any]] = []
    answer: dict[str, Any] | None = None  # the one at the end, while more may belong to it
    for item in items:
        if isinstance(item, OutputItem):
            said = {"role": "tool", "content": _joined(item.output), "tool_call_id": item.call_id}
            messages.append(said)
            answer = None
            continue
        if isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _joined(item.content)})
            answer = None
            continue
        is_new = answer is None or "tool_calls" in answer or bool(answer["content"])
        if answer is None or (is_new and not isinstance(item, CallItem)):
            answer = {"role": "assistant", "content": ""}
            messages.append(answer)
        if isinstance(item, ReasoningItem):
            answer["reasoning_content"] = item.text
        elif isinstance(item, CallItem):
            answer.setdefault("tool_calls", []).append(item.for_template())
        else:
            answer["content"] = _joined(item.content)
    return list(plain_messages(messages))
