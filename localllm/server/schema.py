"""The bodies that clients send: OpenAI's fields, every one of them bounded.

A known field that is not supported is refused, never ignored; unknown fields are allowed, since
clients send their own. Source: OpenAI's API reference, "Create chat completion" and "Create
completion"; top_k, min_p, repetition_penalty, ignore_eos, chat_template_kwargs and
structured_outputs are vLLM's.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from localllm.server.bodies import check_arguments
from localllm.server.limits import LIMITS
from localllm.text.grammar import Grammar, lark_literal
from localllm.text.plain_messages import (
    HIDDEN_PARTS,
    TEXT_PARTS,
    THOUGHT_PARTS,
    plain_message,
)
from localllm.text.prompt import ChatMessage, ThinkLevel
from localllm.text.tool_schemas import without_nulls

Name = Annotated[str, Field(max_length=300)]
Stop = Annotated[str, Field(min_length=1, max_length=LIMITS.stop_chars)]
Source = Annotated[str, Field(min_length=1, max_length=LIMITS.grammar_bytes)]
ToolName = Annotated[str, Field(pattern="^[A-Za-z0-9_.-]{1,128}$")]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
EFFORTS: dict[str, ThinkLevel] = {
    "none": "off",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}


# OpenAI's fields that have no effect here.
_IGNORED = frozenset({"user", "store", "metadata", "service_tier", "safety_identifier"})
OTHER_PARTS = (
    "image_url",
    "input_image",
    "image",
    "input_audio",
    "audio",
    "file",
    "input_file",
    "video_url",
    "video",
)


def at_most(most: int) -> BeforeValidator:
    """Refuses an object with more names before each of them makes an error, which takes long."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > most:
            raise ValueError(f"at most {most:,} names")
        return value

    return BeforeValidator(check)


class Body(BaseModel):
    """Types are not converted: "5" is not a number, and true is not 1."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StructuredOutputs(Body):
    """The format of an answer, under vLLM's names: exactly one of these."""

    model_config = ConfigDict(extra="forbid")

    json_: dict[str, Any] | bool | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: Source | None = None
    grammar: Source | None = None
    choice: (
        Annotated[
            list[Annotated[str, Field(min_length=1)]],
            Field(min_length=1, max_length=LIMITS.choices, fail_fast=True),
        ]
        | None
    ) = None

    @model_validator(mode="after")
    def _one_of_them(self) -> "StructuredOutputs":
        given = (self.json_, self.json_object or None, self.regex, self.grammar, self.choice)
        if sum(each is not None for each in given) != 1:
            raise ValueError("give exactly one of json, json_object, regex, grammar, choice")
        return self

    def grammar_of(self) -> Grammar:
        """The grammar that is asked for. Raises: RequestError."""
        if self.json_ is not None:
            return Grammar.of_schema(self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        if self.grammar is not None:
            return Grammar("lark", self.grammar)
        if self.choice is not None:
            return Grammar("lark", "start: " + " | ".join(map(lark_literal, self.choice)))
        return Grammar.any_object()


class StreamOptions(Body):
    """What a stream contains besides the text."""

    include_usage: bool = False


class WholeBody(Body):
    """A whole body; unknown fields are reported, not refused, since clients send their own."""

    model_config = ConfigDict(extra="allow")

    @property
    def unknown(self) -> list[str]:
        """The names of unknown fields."""
        return sorted(set(self.model_extra or ()) - _IGNORED)


class Sampling(WholeBody):
    """The fields that chats and completions have in common."""

    model: Name | None = None
    max_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: (
        Annotated[
            dict[
                Annotated[str, Field(pattern="^[0-9]{1,9}$")],
                Annotated[float, Field(ge=-100, le=100)],
            ],
            Field(max_length=LIMITS.logit_bias_entries),
            at_most(LIMITS.logit_bias_entries),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None = None
    stop: (
        Stop | Annotated[list[Stop], Field(max_length=LIMITS.stop_strings, fail_fast=True)] | None
    ) = None
    n: Annotated[int, Field(ge=1, le=LIMITS.samples)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    structured_outputs: StructuredOutputs | None = None

    @model_validator(mode="after")
    def _options_go_with_a_stream(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream")
        return self

    @property
    def grammar_field(self) -> str:
        """The field that asks for the answer's format."""
        return "structured_outputs"

    def given(self) -> dict[str, Any]:
        """The fields of SamplingParams that were sent. Raises: RequestError."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        fields = {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": 0 if self.top_k == -1 else self.top_k,
            "min_p": self.min_p,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": None
            if self.logit_bias is None
            else {int(token_id): bias for token_id, bias in self.logit_bias.items()},
            "seed": self.seed,
            "stop": stop or None,
            "n": self.n,
            "ignore_eos": self.ignore_eos or None,
            "grammar": self.structured_outputs and self.structured_outputs.grammar_of(),
        }
        return {name: value for name, value in fields.items() if value is not None}


class ContentPart(Body):
    """A part of a message: text, a refusal, or thoughts, each in the field of its type's name."""

    model_config = ConfigDict(extra="allow")

    type: str = "text"

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"type": "text", "text": value}
        kind = value.get("type", "text") if isinstance(value, dict) else None
        if not isinstance(kind, str) or kind in HIDDEN_PARTS:
            return value
        if kind in OTHER_PARTS:
            raise PydanticCustomError("unsupported_modality", "localllm reads only text")
        fields = {**TEXT_PARTS, **THOUGHT_PARTS}.get(kind)
        if fields is None:
            known = ", ".join((*TEXT_PARTS, *THOUGHT_PARTS))
            raise ValueError(f"a part is one of {known}, not {kind[:60]!r}")
        if not any(isinstance(value.get(name), str | list) for name in fields) and not any(
            name in value and value[name] is None for name in fields
        ):
            raise ValueError(f"a part of type {kind} needs {fields[0]}, a text")
        return value


Parts = Annotated[list[ContentPart], Field(max_length=LIMITS.content_parts)]
# A union would say of a wrong part that it is not a text.
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[Parts, Tag("parts")],
    Discriminator(
        lambda value: (
            "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None
        ),
        custom_error_type="content",
        custom_error_message="must be a text, a list of parts, or null",
    ),
]
Thoughts = Annotated[
    str | None, BeforeValidator(lambda value: value if isinstance(value, str) else None)
]


def _as_text(arguments: Any) -> Any:
    """Arguments as JSON, which some clients send as the object itself, or as null."""
    if arguments is None:
        return "{}"
    return json.dumps(arguments) if isinstance(arguments, dict) else arguments


Arguments = Annotated[str, BeforeValidator(_as_text)]
Parameters = Annotated[dict[str, Any], AfterValidator(without_nulls)]


class FunctionCall(Body):
    """The function and arguments of a call; `arguments` is JSON, or nothing."""

    name: ToolName
    arguments: Arguments = "{}"


class CallMade(Body):
    """A tool call in an earlier answer."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class MessageBody(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    refusal: Thoughts = None
    reasoning: Thoughts = None
    reasoning_content: Thoughts = None
    reasoning_details: list[Any] | None = None
    tool_calls: Annotated[list[CallMade], Field(max_length=LIMITS.tools)] | None = None
    tool_call_id: Name | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        return plain_message(self.model_dump(exclude_none=True))


Messages = Annotated[
    list[MessageBody], Field(min_length=1, max_length=LIMITS.messages, fail_fast=True)
]


class TemplateOptions(Body):
    """The one option that many templates have."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None


class TextFormat(Body):
    """Free text."""

    type: Literal["text"]


class JsonObjectFormat(Body):
    """Any JSON object."""

    type: Literal["json_object"]


class JsonSchema(Body):
    """A schema with its name; it is enforced with or without `strict`."""

    name: Name | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Body):
    """JSON that matches a schema."""

    type: Literal["json_schema"]
    json_schema: JsonSchema


class FunctionDefinition(Body):
    """A function that can be called, with the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None


class ToolDefinition(Body):
    """A tool; every tool is a function."""

    type: Literal["function"]
    function: FunctionDefinition


class ChosenFunction(Body):
    """The name of a function."""

    name: ToolName


class ChosenTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`"""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    response_format: (
        Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
        | None
    ) = None
    tools: (
        Annotated[list[ToolDefinition], Field(max_length=LIMITS.tools, fail_fast=True)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None

    # OpenAI's fields from before tools.
    functions: None = None
    function_call: None = None

    @field_validator("functions", "function_call", mode="before")
    @classmethod
    def _no_functions(cls, value: object) -> None:
        if value is not None:
            raise ValueError("not supported; use tools and tool_choice")

    @field_validator("messages")
    @classmethod
    def _calls_are_small(cls, messages: list[MessageBody]) -> list[MessageBody]:
        """The arguments of calls are JSON within JSON; they are parsed too, for the template."""
        calls = (call for message in messages for call in message.tool_calls or ())
        check_arguments(call.function.arguments for call in calls)
        return messages

    @model_validator(mode="after")
    def _fields_go_together(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        if self.structured_outputs and self.response_format:
            raise ValueError("response_format and structured_outputs cannot be combined")
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("two tools have the same name")
        choice = self.tool_choice
        if choice == "required" and not names:
            raise ValueError("tool_choice needs tools")
        if isinstance(choice, ChosenTool) and choice.function.name not in names:
            raise ValueError("tool_choice names none of the tools")
        return self

    @property
    def callable_tools(self) -> list[ToolDefinition]:
        """The tools that this answer may call."""
        choice, tools = self.tool_choice, self.tools or []
        if isinstance(choice, ChosenTool):
            return [tool for tool in tools if tool.function.name == choice.function.name]
        return [] if choice == "none" else tools

    def for_template(self) -> list[ChatMessage]:
        """The messages as chat templates read them."""
        return [message.for_template() for message in self.messages]

    @property
    def num_to_keep(self) -> int:
        """See AsksChat: this API has no word for it."""
        return 0

    @property
    def compares_with(self) -> str | None:
        """See AsksChat."""
        return None

    @property
    def are_calls_parallel(self) -> bool:
        """Whether there may be several calls."""
        return self.parallel_tool_calls is not False

    @property
    def must_call(self) -> bool:
        """Whether the answer has to be a call."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, ChosenTool)

    @property
    def grammar_field(self) -> str:
        """See Sampling."""
        return "response_format" if self.response_format else "structured_outputs"

    @property
    def think(self) -> ThinkLevel | None:
        """How much the model should think, if the request says so."""
        if self.reasoning_effort is not None:
            return EFFORTS[self.reasoning_effort]
        switch = self.chat_template_kwargs and self.chat_template_kwargs.enable_thinking
        return None if switch is None else "on" if switch else "off"

    def given(self) -> dict[str, Any]:
        """See Sampling."""
        fields = super().given()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        match self.response_format:
            case JsonObjectFormat():
                fields["grammar"] = Grammar.any_object()
            case JsonSchemaFormat(json_schema=asked):
                fields["grammar"] = Grammar.of_schema(asked.schema_)
        return fields


def read_prompts(value: object, most: int = LIMITS.prompts) -> list[str | list[int]]:
    """A text, token ids, or a list of either, as a list of at most `most` prompts.

    Checked by hand, since a union would collect an error for every token and every kind of prompt.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of token ids, or a list of these")
    if all(type(each) is int for each in value):
        return [_read_tokens(value)]
    if len(value) > most:
        raise ValueError(f"at most {most} prompts")
    return [each if isinstance(each, str) else _read_tokens(each) for each in value]


def _read_tokens(value: object) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ValueError("a prompt must be a text or a list of token ids")
    if not all(type(each) is int and 0 <= each < 1 << 31 for each in value):
        raise ValueError("a token id must be a whole number of at least 0")
    return value


_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _TOKENS_SCHEMA]}
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                *PROMPT_SCHEMA["anyOf"],
                {"type": "array", "items": PROMPT_SCHEMA, "maxItems": LIMITS.prompts},
            ]
        }
    ),
]


class CompletionRequest(Sampling):
    """`POST /v1/completions`"""

    prompt: Prompts
    # 0: only the prompt is read.
    max_tokens: Annotated[int, Field(ge=0, le=1 << 24)] | None = None
    logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=LIMITS.samples)] | None = None
    suffix: str | None = None

    @model_validator(mode="after")
    def _a_gap_is_between_texts(self) -> "CompletionRequest":
        if self.suffix and (self.echo or not all(isinstance(each, str) for each in self.prompt)):
            raise ValueError("suffix goes with prompts that are texts, and without echo")
        return self

    @model_validator(mode="after")
    def _best_is_all(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is supported only if it equals n")
        return self

    def given(self) -> dict[str, Any]:
        """See Sampling."""
        fields = super().given()
        if self.max_tokens == 0:
            fields["max_tokens"] = 1
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
            if self.echo:
                fields["prompt_logprobs"] = self.logprobs
        return fields


class TokenizeRequest(WholeBody):
    """`POST /tokenize`: a text, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("give either prompt or messages")
        return self


class DetokenizeRequest(WholeBody):
    """`POST /detokenize`"""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=LIMITS.json_values, fail_fast=True)]
