"""The bodies that clients send: OpenAI's fields, every one of them bounded.

A field that is known and not supported is refused, never ignored; unknown ones are let pass, as
clients send their own. Source: OpenAI's API reference, "Create chat completion" and "Create
completion"; top_k, min_p, repetition_penalty, ignore_eos and chat_template_kwargs are vLLM's.
"""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from localllm.prompt import ThinkLevel
from localllm.server.limits import LIMITS

Name = Annotated[str, Field(max_length=300)]
Stop = Annotated[str, Field(min_length=1, max_length=LIMITS.stop_chars)]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
_EFFORTS: dict[str, ThinkLevel] = {
    "none": "off",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}


class Body(BaseModel):
    """Types are not converted: "5" is no number, and true is not 1."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(Body):
    """What a stream says besides the text."""

    include_usage: bool = False


class Sampling(Body):
    """What chats and completions have in common."""

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

    @model_validator(mode="after")
    def _options_go_with_a_stream(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options goes with stream")
        return self

    def given(self) -> dict[str, Any]:
        """Fields of SamplingParams that were sent."""
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
        }
        return {name: value for name, value in fields.items() if value is not None}


class TextPart(Body):
    """A part of a message; texts are what this server reads."""

    type: Literal["text"]
    text: str


class ChatMessage(Body):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=LIMITS.content_parts)] | None = None
    name: Name | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates read it."""
        text = self.content
        if isinstance(text, list):
            text = "\n".join(part.text for part in text)
        message: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": text or "",
        }
        if self.reasoning_content is not None:
            message["reasoning_content"] = message["thinking"] = self.reasoning_content
        return message


Messages = Annotated[
    list[ChatMessage], Field(min_length=1, max_length=LIMITS.messages, fail_fast=True)
]


class TemplateOptions(Body):
    """The one switch that many templates have."""

    model_config = ConfigDict(extra="forbid")

    enable_thinking: bool | None = None


class TextFormat(Body):
    """Free text, which is what there is."""

    type: Literal["text"]


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`"""

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, le=1 << 24)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    chat_template_kwargs: TemplateOptions | None = None
    response_format: TextFormat | None = None
    tools: Annotated[list[Any], Field(max_length=0)] | None = None
    tool_choice: Literal["none", "auto"] | None = None

    @model_validator(mode="after")
    def _tops_go_with_logprobs(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs goes with logprobs")
        return self

    @property
    def think(self) -> ThinkLevel | None:
        """How much the model shall think, where that was said."""
        if self.reasoning_effort is not None:
            return _EFFORTS[self.reasoning_effort]
        switch = self.chat_template_kwargs and self.chat_template_kwargs.enable_thinking
        return None if switch is None else "on" if switch else "off"

    def given(self) -> dict[str, Any]:
        """See Sampling."""
        fields = super().given()
        if self.max_completion_tokens is not None:
            fields["max_tokens"] = self.max_completion_tokens
        if self.logprobs:
            fields["logprobs"] = self.top_logprobs or 0
        return fields


def _read_prompts(value: object) -> list[str | list[int]]:
    """A text, tokens, or a list of either, as a list of them.

    By hand, since a union would collect an error for every token and every kind of prompt.
    """
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError("must be a text, a list of token ids, or a list of these")
    if all(type(each) is int for each in value):
        return [_read_tokens(value)]
    if len(value) > LIMITS.prompts:
        raise ValueError(f"at most {LIMITS.prompts} prompts")
    return [each if isinstance(each, str) else _read_tokens(each) for each in value]


def _read_tokens(value: object) -> list[int]:
    if not isinstance(value, list) or not value:
        raise ValueError("a prompt must be a text or a list of token ids")
    if not all(type(each) is int and 0 <= each < 1 << 31 for each in value):
        raise ValueError("a token id must be a whole number from 0 on")
    return value


_TOKENS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_SCHEMA = {"anyOf": [{"type": "string"}, _TOKENS_SCHEMA]}
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_read_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                *_PROMPT_SCHEMA["anyOf"],
                {"type": "array", "items": _PROMPT_SCHEMA, "maxItems": LIMITS.prompts},
            ]
        }
    ),
]


class CompletionRequest(Sampling):
    """`POST /v1/completions`"""

    prompt: Prompts
    logprobs: Annotated[int, Field(ge=0, le=LIMITS.logprobs)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=LIMITS.samples)] | None = None
    suffix: str | None = None

    @field_validator("suffix")
    @classmethod
    def _no_suffix(cls, value: str | None) -> str | None:
        if value:
            raise ValueError("suffix is not supported")
        return value

    @model_validator(mode="after")
    def _best_is_all(self) -> "CompletionRequest":
        if self.best_of not in (None, self.n or 1):
            raise ValueError("best_of is not supported, but as many as n")
        return self

    def given(self) -> dict[str, Any]:
        """See Sampling."""
        fields = super().given()
        if self.logprobs is not None:
            fields["logprobs"] = self.logprobs
        return fields


class TokenizeRequest(Body):
    """`POST /tokenize`: a text, or a conversation."""

    model: Name | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True

    @model_validator(mode="after")
    def _one_of_two(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("either prompt or messages")
        return self


class DetokenizeRequest(Body):
    """`POST /detokenize`"""

    model: Name | None = None
    tokens: Annotated[list[TokenId], Field(max_length=1 << 20, fail_fast=True)]
