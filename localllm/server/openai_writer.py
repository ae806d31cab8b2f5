"""Writes completions and chats in OpenAI's formats, whole and in chunks.

Source: OpenAI's API reference, "The chat completion object", "The chat completion chunk object" and
"The completion object"; `reasoning_content` is DeepSeek's name for a model's thoughts, `reasoning`
that of OpenRouter and vLLM 0.16; `stop_reason` is vLLM's for the stop string that cut an answer.
"""

import time
import uuid
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from localllm.answer.completion import TextEvent, TokenInfo
from localllm.schedule.logprobs import read_scores
from localllm.schedule.request import FinishReason
from localllm.server.choice import AnswerWriter, Choice, Frame, Usage
from localllm.server.refusals import Refusal
from localllm.server.token_texts import Shown, TextOffsets, TokenTexts
from localllm.text.prompt_writer import NUM_CONTEXT_TOKENS
from localllm.text.tokenizer import Tokenizer
from localllm.text.tool_calls import ToolCall, ToolFormat

Kind = Literal["chat", "text"]
_DONE = Frame("[DONE]")


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes before its answers."""

    text: str
    token_ids: Sequence[int]


class OpenAIWriter(AnswerWriter):
    """Writes the `num_choices` answers to one request."""

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
        echoes: Sequence[Echo] = (),
        only_reads: bool = False,
    ) -> None:
        """`tools`: how the model writes calls, if the request has tools; `echoes`: the prompts, if
        answers begin with theirs; `wants_usage`: a stream ends with counts of tokens; `only_reads`:
        the answers are empty, since only the prompts were to be read.
        """
        self._kind, self._model = kind, model
        self._has_logprobs, self._wants_usage = has_logprobs, wants_usage
        self._echoes, self._only_reads = echoes, only_reads
        self._samples = num_choices // len(echoes) if echoes else 1
        self.name = f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._choices = [Choice.of(tools) for _ in range(num_choices)]
        self._texts = TokenTexts(tokenizer)
        self._scores: dict[int, bytes] = {}  # of the prompts
        self._offsets = [self._offsets_of(index, tokenizer) for index in range(num_choices)]
        self.usage = Usage()

    def _offsets_of(self, index: int, tokenizer: Tokenizer) -> TextOffsets:
        if not self._echoes:
            return TextOffsets(tokenizer, (), 0)
        echo = self._echoes[index // self._samples]
        return TextOffsets(tokenizer, echo.token_ids[-NUM_CONTEXT_TOKENS:], len(echo.text))

    def add(self, index: int, event: TextEvent) -> None:
        event = self._seen(event)
        if event.prompt_scores is not None:
            self._scores[index // self._samples] = event.prompt_scores
        self._choices[index].add(event)
        self.usage.add(event)

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self._choices):
            described: dict[str, Any] = {"index": index, "finish_reason": choice.ending}
            described |= _cut(choice)
            text, thinking = "".join(choice.text), "".join(choice.thinking)
            if self._kind == "chat":
                message: dict[str, Any] = {"role": "assistant", "content": text}
                if thinking:
                    message |= _thoughts(thinking)
                if choice.calls:
                    message["content"] = text.strip() or None
                    message["tool_calls"] = [_described_call(call) for call in choice.calls]
                described["message"] = message
            else:
                described["text"] = self._echo(index) + text
            described["logprobs"] = self._whole_logprobs(index)
            choices.append(described)
        kind = "chat.completion" if self._kind == "chat" else "text_completion"
        return {**self._head(kind), "choices": choices, "usage": _described_usage(self.usage)}

    def begin(self) -> Iterator[Frame]:
        for index in range(len(self._choices)):
            if self._kind == "chat":
                yield self._chunk(index, {"delta": {"role": "assistant", "content": ""}}, None)
            elif not self._has_logprobs and self._echo(index):
                yield self._chunk(index, {"text": self._echo(index)}, None)

    def frames(self, index: int, event: TextEvent) -> Iterator[Frame]:
        event = self._seen(event)
        if event.prompt_scores is not None and self._echoes:
            yield from self._echoed(index // self._samples)
        tokens = [event.token] if event.token is not None else []
        logprobs = self._logprobs(tokens, index) if tokens else None
        if self._kind == "text":
            if event.text or logprobs:
                yield self._chunk(index, {"text": event.text}, None, logprobs)
        else:
            choice = self._choices[index]
            num_before = len(choice.calls) - len(choice.new_calls)
            delta: dict[str, Any] = {
                **_thoughts(event.thinking),
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
        if self._wants_usage:
            usage = _described_usage(self.usage)
            yield Frame({**self._head(self._chunk_kind), "choices": [], "usage": usage})
        yield _DONE

    def cut(self) -> Iterator[Frame]:
        for index, choice in enumerate(self._choices):
            if choice.ending is None:
                empty: dict[str, Any] = {"text": ""} if self._kind == "text" else {"delta": {}}
                yield self._chunk(index, empty, "abort")
        yield _DONE

    def failed(self, refusal: Refusal) -> Iterable[Frame]:
        return Frame(refusal.content), _DONE

    def _seen(self, event: TextEvent) -> TextEvent:
        """An event as the client sees it."""
        if not self._only_reads:
            return event
        ended = None if event.finish_reason is None else FinishReason.LENGTH
        return replace(event, text="", thinking="", token=None, finish_reason=ended)

    def _echo(self, index: int) -> str:
        return self._echoes[index // self._samples].text if self._echoes else ""

    def _echoed(self, number: int) -> Iterator[Frame]:
        """A prompt with its log-probabilities, at the beginning of each of its answers."""
        logprobs = self._texts.of_text(self._of_prompt(number))
        for sample in range(self._samples):
            index = number * self._samples + sample
            yield self._chunk(index, {"text": self._echo(index)}, None, logprobs)

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
            return self._texts.of_chat(tokens)
        return self._texts.of_text(self._offsets[index].place(tokens))

    def _whole_logprobs(self, index: int) -> dict[str, Any] | None:
        """Of the answer, and of its prompt if that is echoed."""
        tokens = self._choices[index].tokens
        number = index // self._samples
        if number not in self._scores:
            return self._logprobs(tokens, index)
        return self._texts.of_text([*self._of_prompt(number), *self._offsets[index].place(tokens)])

    def _of_prompt(self, number: int) -> list[Shown]:
        echo = self._echoes[number]
        return self._texts.of_prompt(echo.token_ids, echo.text, read_scores(self._scores[number]))


def _thoughts(text: str) -> dict[str, str]:
    """Thoughts under both names that clients know."""
    return {"reasoning_content": text, "reasoning": text}


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
