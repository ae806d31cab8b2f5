"""A model on an OpenAI-compatible server, ours or another, as an Answerer.

This side knows only text: the server has the tokenizer, and each chunk counts as one token.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any

from localllm.answer.completion import Completion, Sample, TextEvent, TokenInfo
from localllm.answer.event_stream import EventSource, EventStream
from localllm.answer.overflow import UNKNOWN_CONTEXT
from localllm.attach.openai_chunks import Chunk, Usage
from localllm.attach.openai_client import SILENCE_S, Endpoint, Reply
from localllm.attach.unsplit_thoughts import UnsplitThoughts
from localllm.errors import ExitCode, LocalLLMError, RequestError
from localllm.schedule.request import FinishReason
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.context import Context
from localllm.text.prompt import Asked, Conversation, Prompt, Text
from localllm.text.thinking import Split

# One wait for a chunk, short enough to notice Ctrl-C.
_LOOK_S = 0.05
# Unread chunks; a server that is faster than their reader has to wait.
_MAX_WAITING = 64
_CHUNK_ID = -1
_REASONS = {"length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_OPENAI = ("temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_OTHERS = ("top_k", "min_p", "repetition_penalty", "ignore_eos")


@dataclass(frozen=True, slots=True)
class _Arrived:
    """A chunk and its time of arrival."""

    chunk: Chunk
    time_s: float


class _Reader:
    """Reads an answer in a thread of its own, so that waiting for it can be interrupted."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        # None: the answer has ended.
        self._arrived: Queue[_Arrived | Exception | None] = Queue(_MAX_WAITING)
        self._is_left = threading.Event()
        threading.Thread(target=self._read, name="remote-reader", daemon=True).start()

    def take(self) -> _Arrived | None:
        """The next chunk, or None at the end. Raises: Empty if none has come for a moment;
        LocalLLMError if the answer cannot be read.
        """
        found = self._arrived.get(timeout=_LOOK_S)
        if isinstance(found, Exception):
            raise found
        return found

    def leave(self) -> None:
        """Stop reading and hang up."""
        self._is_left.set()
        self._reply.hang_up()

    def _read(self) -> None:
        try:
            with self._reply:
                for chunk in self._reply.chunks():
                    if not self._put(_Arrived(chunk, time.monotonic())):
                        return
            self._put(None)
        except Exception as error:  # take() raises it
            self._put(error)

    def _put(self, found: _Arrived | Exception | None) -> bool:
        while not self._is_left.is_set():
            try:
                self._arrived.put(found, timeout=_LOOK_S)
            except Full:
                continue
            return True
        return False


@dataclass(slots=True)
class _Open:
    """A request, the reader of its answer, and its events. `last`, the last event, is held back
    until the usage has come. `thoughts` splits them off; None for a text or a required form.
    """

    reader: _Reader
    thoughts: UnsplitThoughts | None
    last: TextEvent | None = None
    usage: Usage | None = None
    inbox: deque[TextEvent] = field(default_factory=deque)
    has_said: bool = False
    calls_tools: bool = False
    is_open: bool = True
    silent_s: float = 0.0


class RemoteModel(EventSource):
    """See Answerer: a model on a server. Must be used from one thread."""

    # The server has the template, and ignores what it does not know about thinking.
    has_chat_template = can_think = True
    cached_elsewhere = ""

    def __init__(self, endpoint: Endpoint, name: str, context_length: int, load_s: float) -> None:
        self._endpoint = endpoint
        self.name, self.load_s = name, load_s
        # As far as is known, it keeps no states.
        self.context = Context(context_length, "another server")
        self._requests: dict[int, _Open] = {}
        self._next_id = 0

    def twin(self) -> "RemoteModel":
        """The same model for another thread."""
        return RemoteModel(self._endpoint, self.name, self.context.length, self.load_s)

    def sampling_params(self, **given: Any) -> SamplingParams:
        """See Answerer: the server decides on what is not given."""
        return SamplingParams(**given, given=tuple(given))

    def ask(
        self, asked: Asked, params: SamplingParams, said: Sequence[int] = ()
    ) -> tuple[Completion, EventStream]:
        """See Answerer. Raises: LocalLLMError if the server refuses."""
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                raise RequestError(f"{name} and --remote cannot be combined", param=name)
        if said or isinstance(asked, Prompt):
            raise RequestError(
                "a remote answer cannot be continued", hint="/regen asks for another"
            )
        path, body = _described(asked)
        body |= {**_fields(params), "model": self.name, "stream": True}
        body["stream_options"] = {"include_usage": True}
        completion = Completion(0, time.monotonic(), [Sample()], is_remote=True)
        is_plain = isinstance(asked, Text) or params.grammar is not None
        thoughts = None if is_plain else UnsplitThoughts()
        opened = _Open(_Reader(self._endpoint.request(path, body)), thoughts)
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._requests[request_id] = opened

        def book(event: TextEvent) -> None:
            completion.add(event)
            if event.finish_reason is not None and opened.usage is not None:
                completion.num_prompt_tokens = opened.usage.prompt_tokens or 0
                completion.num_cached_tokens = opened.usage.cached_tokens or 0
                completion.num_counted_tokens = opened.usage.completion_tokens

        events = EventStream(self, request_id)
        events.on_event.append(book)
        return completion, events

    def count(self, asked: Asked, limit: int | None = None) -> int:
        """See Answerer: only the server can count."""
        return 0

    def decode(self, token_ids: Sequence[int]) -> str:
        """See Answerer: servers send no tokens."""
        return ""

    def work_ahead(self) -> bool:
        """See Answerer."""
        return False

    def close(self) -> None:
        """See Answerer."""
        for opened in self._requests.values():
            opened.reader.leave()

    def take(self, request_id: int) -> TextEvent | None:
        inbox = self._requests[request_id].inbox
        return inbox.popleft() if inbox else None

    def is_open(self, request_id: int) -> bool:
        return self._requests[request_id].is_open

    def forget(self, request_id: int) -> None:
        self._requests.pop(request_id).reader.leave()

    def step(self) -> None:
        """Wait briefly for the next chunk of each request. Raises: LocalLLMError."""
        for opened in list(self._requests.values()):
            try:
                self._advance(opened)
            except LocalLLMError:
                opened.is_open = False
                opened.reader.leave()
                raise

    def _advance(self, opened: _Open) -> None:
        try:
            arrived = opened.reader.take()
        except Empty:
            # Counted in waits: an hour for which this program was suspended must not count.
            opened.silent_s += _LOOK_S
            if opened.silent_s >= SILENCE_S:
                raise LocalLLMError(
                    f"the server has said nothing for {SILENCE_S:.0f} s", hint="ask again"
                ) from None
            return
        opened.silent_s = 0.0
        if arrived is not None:
            self._book(opened, arrived)
            return
        opened.is_open = False
        if opened.last is None:
            raise LocalLLMError("the server broke off its answer", hint="ask again")
        if opened.calls_tools and not opened.has_said:
            raise LocalLLMError(
                "the server answers with a call of a tool, and chat runs none", hint="ask again"
            )
        opened.inbox.append(opened.last)

    def _book(self, opened: _Open, arrived: _Arrived) -> None:
        chunk, time_s = arrived.chunk, arrived.time_s
        opened.usage = chunk.usage or opened.usage
        opened.calls_tools = opened.calls_tools or chunk.calls_tools
        text, thinking = chunk.text, chunk.thinking
        if opened.thoughts is not None:
            split = opened.thoughts.push(text)
            rest = Split() if chunk.finish_reason is None else opened.thoughts.flush()
            text = split.answer + rest.answer
            thinking += split.thinking + rest.thinking
        opened.has_said = opened.has_said or bool(text or thinking)
        if chunk.finish_reason is not None:
            reason = _REASONS.get(chunk.finish_reason, FinishReason.STOP)
            opened.last = _event(text, thinking, reason, time_s)
        elif text or thinking:
            opened.inbox.append(_event(text, thinking, None, time_s))


def open_remote(url: str, model: str | None, api_key: str | None) -> RemoteModel:
    """The model named `model` on a server, or its first model.

    Raises: LocalLLMError if no such server answers, or it has no such model.
    """
    began_s = time.monotonic()
    endpoint = Endpoint.parse(url, api_key, "--remote")
    listed = endpoint.models()
    name = model or next(iter(listed), None)
    if name is None or name not in listed:
        raise LocalLLMError(
            f"{endpoint.url} has no model" + ("" if name is None else f" {name!r:.100}"),
            hint=f"it has {', '.join(listed)}"[:300] if listed else "",
            exit_code=ExitCode.MODEL,
        )
    length = listed[name].get("max_model_len")
    if length is None:
        length = UNKNOWN_CONTEXT
    elif type(length) is not int or length < 1:
        raise LocalLLMError(
            f"{endpoint.url} does not answer like an OpenAI-compatible server",
            where=f"GET /v1/models: max_model_len is {length!r:.40}",
        )
    return RemoteModel(endpoint, name, length, time.monotonic() - began_s)


def _described(asked: Text | Conversation) -> tuple[str, dict[str, Any]]:
    """The path that a question is sent to, and the body that describes it."""
    if isinstance(asked, Text):
        return "/v1/completions", {"prompt": asked.content}
    body: dict[str, Any] = {"messages": [dict(message) for message in asked.messages]}
    if asked.tools:
        body["tools"] = list(asked.tools)
    if asked.think in ("on", "off"):
        body["chat_template_kwargs"] = {"enable_thinking": asked.think == "on"}
    elif asked.think is not None:
        body["reasoning_effort"] = asked.think
    return "/v1/chat/completions", body


def _fields(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters to send: those that were given, or differ from the defaults."""
    usual = SamplingParams()
    body = {
        name: getattr(params, name)
        for name in (*_OPENAI, *_OTHERS)
        if name in params.given or getattr(params, name) != getattr(usual, name)
    }
    if params.stop:
        body["stop"] = list(params.stop)
    if params.logit_bias:
        body["logit_bias"] = {str(i): bias for i, bias in params.logit_bias.items()}
    grammar = params.grammar
    if grammar is not None and grammar.kind == "json_schema":
        named = {"name": "answer", "strict": True, "schema": json.loads(grammar.source)}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    elif grammar is not None:
        kind = "regex" if grammar.kind == "regex" else "grammar"
        body["structured_outputs"] = {kind: grammar.source}
    return {name: value for name, value in body.items() if value is not None}


def _event(text: str, thinking: str, reason: FinishReason | None, time_s: float) -> TextEvent:
    token = TokenInfo(_CHUNK_ID, None, is_draft=False) if text or thinking else None
    return TextEvent(
        sample=0,
        text=text,
        thinking=thinking,
        token=token,
        finish_reason=reason,
        error=None,
        num_cached_tokens=0,
        num_drafted_tokens=0,
        time_s=time_s,
    )
