"""Writes completions and chats in OpenAI's formats, whole and in chunks.

Source: OpenAI's API reference, "The chat completion object", "The chat completion chunk object" and
"The completion object"; `reasoning_content` is DeepSeek's name for a model's thoughts,
`stop_reason` vLLM's for the stop string that cut an answer.
"""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from localllm.answer.completion import TextEvent, TokenInfo
from localllm.server.choice import Choice, Frame, Usage
from localllm.server.guard import Refusal
from localllm.text.tokenizer import Tokenizer
from localllm.text.tool_calls import ToolCall, ToolFormat

Kind = Literal["chat", "text"]
_DONE = Frame("[DONE]")


class OpenAIWriter:
    """Writes the `num_choices` answers to one request; see AnswerWriter."""

    def __init__(
        self,
        kind: Kind,
        model: str,
        tokenizer: Tokenizer,
        num_choices: int,
        *,
        has_logprobs: bool,
        wants_usage: bool = False,
        tools: ToolFormat | None = None,
        echoes: Sequence[str] = (),
    ) -> None:
        """`tools`: how the model writes calls, if the request has tools; `echoes`: what each answer
        begins with; `wants_usage`: a stream ends with counts of tokens.
        """
        self._kind, self._model, self._tokenizer = kind, model, tokenizer
        self._has_logprobs, self._wants_usage = has_logprobs, wants_usage
        self._echoes = echoes
        self.name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices = [Choice.of(tools) for _ in range(num_choices)]
        self._offsets = [0] * num_choices
        self.usage = Usage()

    def add(self, index: int, event: TextEvent) -> None:
        """See AnswerWriter."""
        self._choices[index].add(event)
        self.usage.add(event)

    def whole(self) -> dict[str, Any]:
        """See AnswerWriter."""
        choices = []
        for index, choice in enumerate(self._choices):
            described: dict[str, Any] = {"index": index, "finish_reason": choice.ending}
            described |= _cut(choice)
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
                described["text"] = (self._echoes[index] if self._echoes else "") + text
            described["logprobs"] = self._logprobs(choice.tokens, index)
            choices.append(described)
        kind = "chat.completion" if self._kind == "chat" else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": _described_usage(self.usage)}

    def begin(self) -> Iterator[Frame]:
        """See AnswerWriter."""
        for index in range(len(self._choices)):
            if self._kind == "chat":
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)
            elif self._echoes and self._echoes[index]:
                yield self._chunk(index, {"text": self._echoes[index]}, None)

    def frames(self, index: int, event: TextEvent) -> Iterator[Frame]:
        """See AnswerWriter."""
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
            yield self._chunk(index, empty | _cut(ended), ended.ending)

    def end(self) -> Iterator[Frame]:
        """See AnswerWriter."""
        if self._wants_usage:
            usage = _described_usage(self.usage)
            yield Frame({**self._head(self._chunk_kind), "choices": [], "usage": usage})
        yield _DONE

    def cut(self) -> Iterator[Frame]:
        """See AnswerWriter."""
        for index, choice in enumerate(self._choices):
            if choice.ending is None:
                empty: dict[str, Any] = {"text": ""} if self._kind == "text" else {"delta": {}}
                yield self._chunk(index, empty, "abort")
        yield _DONE

    def failed(self, refusal: Refusal) -> Iterable[Frame]:
        """See AnswerWriter."""
        return Frame(refusal.content), _DONE

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self._kind == "chat" else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": kind,
            "created": self._created,
            "model": self._model,
        }

    def _chunk(
        self, index: int, content: dict[str, Any], reason: str | None, logprobs: Any = None
    ) -> Frame:
        choice = {"index": index, **content, "finish_reason": reason, "logprobs": logprobs}
        return Frame({**self._head(self._chunk_kind), "choices": [choice]})

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


def _cut(choice: Choice) -> dict[str, Any]:
    """The stop string that cut the answer, if one did, under vLLM's name."""
    return {} if choice.stop_string is None else {"stop_reason": choice.stop_string}


def _described_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.num_prompt,
        "completion_tokens": usage.num_completion,
        "total_tokens": usage.num_prompt + usage.num_completion,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached, **usage.why()},
        "completion_tokens_details": {"accepted_prediction_tokens": usage.num_accepted},
    }


def _described_call(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _logprob(token: TokenInfo) -> float:
    # JSON has no infinities; OpenAI's own servers send this number instead.
    return max(-9999.0, token.logprobs.logprob) if token.logprobs is not None else -9999.0


def _top(token: TokenInfo) -> list[tuple[int, float]]:
    top = token.logprobs.top if token.logprobs is not None else ()
    return [(token_id, max(-9999.0, logprob)) for token_id, logprob in top]
