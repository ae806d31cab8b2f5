"""The bodies that clients send: OpenAI's fields, every one of them bounded.

A known field that is not supported is refused, never ignored; unknown fields are allowed, since
clients send their own. Source: OpenAI's API reference, "Create chat completion" and "Create
completion"; top_k, min_p, repetition_penalty, ignore_eos, chat_template_kwargs,
continue_final_message, add_generation_prompt and add_special_tokens are vLLM's; parse_special is
llama.cpp's. For the form of an answer see forms_schema.py.
"""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Discriminator,
    Field,
    PlainValidator,
    Tag,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from localllm.server.body import Body, Name, WholeBody, never
from localllm.server.body_reader import check_arguments
from localllm.server.chat_asked import ChatAsked, ToolUse
from localllm.server.forms_schema import Forms
from localllm.server.limits import LIMITS
from localllm.server.tools_schema import ToolDefinition, ToolName
from localllm.text.plain_messages import (
    HIDDEN_PARTS,
    TEXT_PARTS,
    THOUGHT_PARTS,
    plain_message,
)
from localllm.text.prompt import ThinkLevel

Stop = Annotated[str, Field(min_length=1, max_length=LIMITS.stop_chars)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
EFFORTS: dict[str, ThinkLevel] = {
    "none": "off",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}


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


def _none_if_minus_one(value: object) -> object:
    return None if value == -1 else value


# -1 means none, as llama.cpp and Ollama have it.
MINUS_ONE_IS_NONE = BeforeValidator(_none_if_minus_one)
MaxTokens = Annotated[Annotated[int, Field(ge=1, le=1 << 24)] | None, MINUS_ONE_IS_NONE]
# A `top_p` of 0 leaves the likeliest token alone, as OpenAI has it; a `top_k` of -1 all.
TopP = Annotated[
    Annotated[float, Field(ge=0, le=1)], AfterValidator(lambda top_p: max(1e-9, top_p))
]
TopK = Annotated[
    Annotated[int, Field(ge=-1, lt=1 << 31)], AfterValidator(lambda top_k: max(0, top_k))
]


class StreamOptions(Body):
    """What a stream contains besides the text."""

    include_usage: bool | None = None


class Sampling(Forms):
    """The fields that chats and completions have in common."""

    model: Name | None = None
    max_tokens: MaxTokens = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
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
    ignore_eos: bool | None = None

    @model_validator(mode="after")
    def _options_go_with_a_stream(self) -> "Sampling":
        asked = self.stream_options
        if asked is not None and asked.include_usage and not self.stream:
            raise ValueError("stream_options needs stream")
        return self

    def given(self) -> dict[str, Any]:
        """The fields of SamplingParams that were sent. Raises: RequestError."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        bias = self.logit_bias
        return self.sent(
            *("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "n"),
            *("presence_penalty", "frequency_penalty", "repetition_penalty"),
            logit_bias=None if bias is None else {int(i): each for i, each in bias.items()},
            stop=stop or None,
            ignore_eos=self.ignore_eos or None,
            grammar=self.form(),
        )


class ContentPart(Body):
    """A part of a message: text, a refusal, or thoughts, each in the field of its type's name."""

    IS_OPEN: ClassVar[bool] = True

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


# What the server itself gives to templates.
_TAKEN = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "think",
        "parse_special",
        "chat_template",
        "tokenize",
        "self",
        "template",
    }
)
TemplateOptions = Annotated[
    dict[Annotated[str, Field(pattern="^[A-Za-z_][A-Za-z0-9_]{0,63}$")], Any],
    at_most(LIMITS.template_options),
]


class ChosenFunction(Body):
    """The name of a function."""

    name: ToolName


class ChosenTool(Body):
    """The one tool that must be called."""

    type: Literal["function"]
    function: ChosenFunction


# OpenAI's fields from before tools.
BeforeTools = Annotated[None, never("not supported; use tools and tool_choice")]


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`"""

    messages: Messages
    max_completion_tokens: MaxTokens = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: (
        Annotated[list[ToolDefinition], Field(max_length=LIMITS.tools, fail_fast=True)] | None
    ) = None
    tool_choice: Literal["none", "auto", "required", "any"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None

    functions: BeforeTools = None
    function_call: BeforeTools = None

    @field_validator("messages")
    @classmethod
    def _calls_are_small(cls, messages: list[MessageBody]) -> list[MessageBody]:
        """The arguments of calls are JSON within JSON; they are parsed too, for the template."""
        calls = (call for message in messages for call in message.tool_calls or ())
        check_arguments(call.function.arguments for call in calls)
        return messages

    @model_validator(mode="after")
    def _fields_go_together(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs")
        self._tool_use()
        taken = _TAKEN & (self.chat_template_kwargs or {}).keys()
        if taken:
            raise ValueError(f"chat_template_kwargs cannot set {min(taken)}")
        return self

    @model_validator(mode="after")
    def _an_answer_that_goes_on_has_begun(self) -> "ChatRequest":
        if not self.continue_final_message:
            return self
        last = self.messages[-1]
        if last.role != "assistant" or last.tool_calls:
            raise ValueError("continue_final_message needs a last message of the assistant's")
        if self.add_generation_prompt:
            raise ValueError("continue_final_message goes without add_generation_prompt")
        if self.form() is not None or self._tool_use().must_call:
            raise ValueError("an answer that has begun cannot have a form")
        return self

    def asked(self) -> ChatAsked:
        """The conversation that the body holds."""
        goes_on = bool(self.continue_final_message)
        messages = [message.for_template() for message in self.messages]
        given = self.chat_template_kwargs or {}
        switches = [value for name, value in given.items() if _is_switch(name, value)]
        variables = {name: value for name, value in given.items() if not _is_switch(name, value)}
        if self.add_generation_prompt is False and not goes_on:
            variables["add_generation_prompt"] = False
        think: ThinkLevel | None = None
        if self.reasoning_effort is not None:
            think = EFFORTS[self.reasoning_effort]
        elif switches:
            think = "on" if switches[0] else "off"
        return ChatAsked(
            messages[:-1] if goes_on else messages,
            self._tool_use(),
            think,
            begun=str(messages[-1]["content"]) if goes_on else "",
            variables=variables,
        )

    def _tool_use(self) -> ToolUse:
        tools, choice, are_parallel = self.tools or (), self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, ChosenTool):
            return ToolUse(tools, "required", choice.function.name, are_parallel)
        if choice == "any":  # as Mistral says it
            choice = "required"
        return ToolUse(tools, choice or "auto", None, are_parallel)

    def given(self) -> dict[str, Any]:
        fields = super().given()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return fields


def _is_switch(name: str, value: object) -> bool:
    """Whether a template's option is the switch for thinking, under one of its names."""
    return name in ("enable_thinking", "thinking") and isinstance(value, bool)


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
    max_tokens: Annotated[Annotated[int, Field(ge=0, le=1 << 24)] | None, MINUS_ONE_IS_NONE] = None
    logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=LIMITS.samples)] | None = None
    suffix: str | None = None
    # Whether special tokens in a text are read as such, and whether it gets those of its model.
    parse_special: bool | None = None
    add_special_tokens: bool | None = None

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
