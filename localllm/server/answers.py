"""Writes answers in OpenAI's formats, whole and in chunks, from the engine's events.

Source: OpenAI's API reference, "The chat completion object", "The chat completion chunk object" and
"The completion object"; `reasoning_content` is DeepSeek's name for a model's thoughts,
`stop_reason` vLLM's for the stop string that cut an answer.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from localllm.answer.completion import TextEvent, TokenInfo
from localllm.text.tokenizer import Tokenizer
from localllm.text.tool_calls import ToolCall, ToolCallSplitter, ToolFormat

Kind = Literal["chat", "text"]
_REASONS = {"stop": "stop", "length": "length", "abort": "stop"}


@dataclass(slots=True)
class Usage:
    """Token counts of a request, over all its prompts and samples."""

    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    num_accepted: int = 0

    def add(self, event: TextEvent) -> None:
        """Count an event's token."""
        if event.token is not None:
            self.num_completion += 1
            self.num_accepted += event.token.is_draft

    def as_json(self) -> dict[str, Any]:
        """The `usage` object of OpenAI's API."""
        return {
            "prompt_tokens": self.num_prompt,
            "completion_tokens": self.num_completion,
            "total_tokens": self.num_prompt + self.num_completion,
            "prompt_tokens_details": {"cached_tokens": self.num_cached},
            "completion_tokens_details": {"accepted_prediction_tokens": self.num_accepted},
        }


@dataclass(slots=True)
class _Choice:
    """`new_text` and `new_calls` are what the newest event brought."""

    splitter: ToolCallSplitter | None
    # In pieces: a growing string would be copied with each event.
    text: list[str] = field(default_factory=list)
    thinking: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    new_text: str = ""
    new_calls: list[ToolCall] = field(default_factory=list)
    reason: str | None = None
    stop_string: str | None = None
    tokens: list[TokenInfo] = field(default_factory=list)

    def add(self, event: TextEvent) -> None:
        self.new_text, self.new_calls = event.text, []
        if self.splitter is not None:
            self.new_text, self.new_calls = self.splitter.push(event.text)
            if event.finish_reason is not None:
                text, calls = self.splitter.flush()
                self.new_text += text
                self.new_calls += calls
        self.text.append(self.new_text)
        self.calls += self.new_calls
        self.thinking.append(event.thinking)
        if event.token is not None:
            self.tokens.append(event.token)
        if event.finish_reason is not None:
            self.reason = _REASONS.get(event.finish_reason, "stop")
            self.stop_string = event.stop_string
            if self.reason == "stop" and self.calls:
                self.reason = "tool_calls"

    def cut(self) -> dict[str, Any]:
        """The stop string that cut the answer, if one did, under vLLM's name."""
        return {} if self.stop_string is None else {"stop_reason": self.stop_string}


class Writer:
    """Writes the `num_choices` answers to one request."""

    def __init__(
        self,
        kind: Kind,
        model: str,
        tokenizer: Tokenizer,
        num_choices: int,
        *,
        has_logprobs: bool,
        tools: ToolFormat | None = None,
    ) -> None:
        """`tools`: how the model writes calls, if the request has tools."""
        self._kind, self._model, self._tokenizer = kind, model, tokenizer
        self._has_logprobs = has_logprobs
        self._id = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices = [
            _Choice(None if tools is None else ToolCallSplitter(tools)) for _ in range(num_choices)
        ]
        self._offsets = [0] * num_choices
        self.usage = Usage()

    def add(self, index: int, event: TextEvent) -> None:
        """Add an event of choice `index`."""
        self._choices[index].add(event)
        self.usage.add(event)

    def whole(self, echoes: Sequence[str] = ()) -> dict[str, Any]:
        """The response object of an answer that is not streamed."""
        choices = []
        for index, choice in enumerate(self._choices):
            described: dict[str, Any] = {"index": index, "finish_reason": choice.reason}
            described |= choice.cut()
            text, thinking = "".join(choice.text), "".join(choice.thinking)
            if self._kind == "chat":
                message: dict[str, Any] = {"role": "assistant", "content": text}
                if thinking:
                    message["reasoning_content"] = thinking
                if choice.calls:
                    message["content"] = text.strip() or None
                    message["tool_calls"] = [_described_call(call) for call in choice.calls]
                described["message"] = message
            else:
                described["text"] = (echoes[index] if echoes else "") + text
            described["logprobs"] = self._logprobs(choice.tokens, index)
            choices.append(described)
        kind = "chat.completion" if self._kind == "chat" else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": self.usage.as_json()}

    def first_chunks(self, echoes: Sequence[str] = ()) -> Iterable[dict[str, Any]]:
        """The chunks that come before any token."""
        for index in range(len(self._choices)):
            if self._kind == "chat":
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)
            elif echoes and echoes[index]:
                yield self._chunk(index, {"text": echoes[index]}, None)

    def chunks(self, index: int, event: TextEvent) -> Iterable[dict[str, Any]]:
        """The chunks of one event; call `add` with it first."""
        tokens = [event.token] if event.token is not None else []
        logprobs = self._logprobs(tokens, index) if tokens else None
        if self._kind == "text":
            if event.text or logprobs:
                yield self._chunk(index, {"text": event.text}, None, logprobs)
        else:
            choice = self._choices[index]
            num_before = len(choice.calls) - len(choice.new_calls)
            delta: dict[str, Any] = {
                "reasoning_content": event.thinking,
                "content": choice.new_text,
                "tool_calls": [
                    {"index": place, **_described_call(call)}
                    for place, call in enumerate(choice.new_calls, num_before)
                ],
            }
            said = {name: value for name, value in delta.items() if value}
            if said or logprobs:
                yield self._chunk(index, {"delta": said}, None, logprobs)
        if event.finish_reason is not None:
            empty: dict[str, Any] = {"text": ""} if self._kind == "text" else {"delta": {}}
            ended = self._choices[index]
            yield self._chunk(index, empty | ended.cut(), ended.reason)

    def cut_chunks(self) -> Iterable[dict[str, Any]]:
        """The last chunks of unfinished choices that will not continue."""
        for index, choice in enumerate(self._choices):
            if choice.reason is None:
                empty: dict[str, Any] = {"text": ""} if self._kind == "text" else {"delta": {}}
                yield self._chunk(index, empty, "abort")

    def usage_chunk(self) -> dict[str, Any]:
        """The last chunk, if usage was asked for."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": self.usage.as_json()}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._kind == "chat" else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _chunk(
        self, index: int, content: dict[str, Any], reason: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        choice = {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}
        return {**self._head(self._chunk_kind), "choices": [choice]}

    def _logprobs(self, tokens: Sequence[TokenInfo], index: int) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        if self._kind == "chat":
            return {"content": [self._token(token) for token in tokens]}
        texts = [self._tokenizer.decode([token.token_id]) for token in tokens]
        offsets = []
        for text in texts:
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [_logprob(token) for token in tokens],
            "top_logprobs": [
                {self._tokenizer.decode([i]): logprob for i, logprob in _top(token)}
                for token in tokens
            ],
            "text_offset": offsets,
        }

    def _token(self, token: TokenInfo) -> dict[str, Any]:
        top = [self._described(token_id, logprob) for token_id, logprob in _top(token)]
        return {**self._described(token.token_id, _logprob(token)), "top_logprobs": top}

    def _described(self, token_id: int, logprob: float) -> dict[str, Any]:
        text = self._tokenizer.decode([token_id])
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}


def _described_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprob(token: TokenInfo) -> float:
    # JSON has no infinities; OpenAI's own servers send this number instead.
    return max(-9999.0, token.logprobs.logprob) if token.logprobs is not None else -9999.0


def _top(token: TokenInfo) -> list[tuple[int, float]]:
    top = token.logprobs.top if token.logprobs is not None else ()
    return [(token_id, max(-9999.0, logprob)) for token_id, logprob in top]
