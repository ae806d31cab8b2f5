"""A model behind an OpenAI-compatible server, ours or another's, as one that is ready to answer.

What is known here is text: the server has the tokenizer, and a token is whatever comes at once.
"""

import json
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from queue import Empty, Full, Queue
from typing import Any

from localllm.answer.completion import Completion, TextEvent, TokenInfo
from localllm.answer.loaded_model import LoadedModel
from localllm.answer.overflow import UNKNOWN_CONTEXT
from localllm.answer.text_engine import EventStream
from localllm.attach.openai_chunks import Chunk, Usage
from localllm.attach.openai_client import SILENCE_S, Endpoint, Reply
from localllm.engine.request import FinishReason
from localllm.engine.sampling_params import SamplingParams
from localllm.errors import ExitCode, LocalLLMError, RequestError
from localllm.hub.generation_config import GenerationDefaults
from localllm.text.prompt import ChatMessage, Prompt, ThinkLevel
from localllm.text.prompt_writer import PromptWriter
from localllm.text.thinking import Split
from localllm.text.tokenizer import Tokenizer

# A look at what has come, so that Ctrl-C is heard.
_LOOK_S = 0.05
# Chunks that wait; a server that is faster than who reads waits too.
_MAX_WAITING = 64
_CHUNK_ID = -1
_REASONS = {"length": FinishReason.LENGTH, "abort": FinishReason.ABORT}
_OPENAI = ("temperature", "top_p", "max_tokens", "seed", "presence_penalty", "frequency_penalty")
_OTHERS = ("top_k", "min_p", "repetition_penalty", "ignore_eos")


@dataclass(frozen=True, slots=True)
class _RemotePrompt(Prompt):
    """What is sent: a path and a body; it has no tokens here."""

    path: str = ""
    body: Mapping[str, Any] = field(default_factory=dict)


class _RemoteTokenizer(Tokenizer):
    """Says of texts what is asked of a tokenizer before they are sent."""

    def __init__(self) -> None:
        """It has no vocabulary."""

    @property
    def has_chat_template(self) -> bool:
        return True

    @property
    def can_think(self) -> bool:
        return True

    def count_at_least(self, text: str, limit: int) -> int:
        return 0  # the server counts

    def decode(self, token_ids: Sequence[int], shown: str = "") -> str:
        return ""

    def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        think: ThinkLevel | None = None,
        parse_special: bool = False,
        **variables: Any,
    ) -> Prompt:
        body: dict[str, Any] = {"messages": [dict(message) for message in messages]}
        if tools:
            body["tools"] = list(tools)
        if think in ("on", "off"):
            body["chat_template_kwargs"] = {"enable_thinking": think == "on"}
        elif think is not None:
            body["reasoning_effort"] = think
        return _RemotePrompt([], path="/v1/chat/completions", body=body)


class _RemotePrompts(PromptWriter):
    def text(self, prompt: str | Sequence[int], *, parse_special: bool = False) -> Prompt:
        return _RemotePrompt([], path="/v1/completions", body={"prompt": prompt})


@dataclass(frozen=True, slots=True)
class _Arrived:
    """What a server sent, and when it was here."""

    chunk: Chunk
    time_s: float


class _Reader:
    """Reads an answer in a thread of its own: whoever waits for it can be interrupted."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply
        # None: the answer has ended.
        self._arrived: Queue[_Arrived | Exception | None] = Queue(_MAX_WAITING)
        self._is_left = threading.Event()
        threading.Thread(target=self._read, name="remote-reader", daemon=True).start()

    def take(self) -> _Arrived | None:
        """What comes next, or None at the end. Raises: Empty where nothing has come for a moment;
        LocalLLMError for what cannot be read.
        """
        found = self._arrived.get(timeout=_LOOK_S)
        if isinstance(found, Exception):
            raise found
        return found

    def leave(self) -> None:
        """Nobody takes anything any more."""
        self._is_left.set()
        self._reply.hang_up()

    def _read(self) -> None:
        try:
            with self._reply:
                for chunk in self._reply.chunks():
                    if not self._put(_Arrived(chunk, time.monotonic())):
                        return
            self._put(None)
        except Exception as error:  # raised where it is taken
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
    """A request: who reads its answer, and what that became. `last` waits for the usage."""

    reader: _Reader
    inbox: deque[TextEvent] = field(default_factory=deque)
    last: TextEvent | None = None
    usage: Usage | None = None
    is_open: bool = True
    silent_s: float = 0.0


class RemoteEngine:
    """See Answering. One thread calls it."""

    def __init__(self, endpoint: Endpoint, model: str, context_length: int) -> None:
        self._endpoint, self._model = endpoint, model
        self._context_length = context_length
        self._tokenizer = _RemoteTokenizer()
        self._requests: dict[int, _Open] = {}
        self._next_id = 0
        # Fields that were asked for, besides those that differ from what is usual.
        self.given: frozenset[str] = frozenset()

    @property
    def tokenizer(self) -> Tokenizer:
        """See Answering."""
        return self._tokenizer

    @property
    def context_length(self) -> int:
        """See Answering."""
        return self._context_length

    @property
    def way_to_longer_context(self) -> str:
        """See Answering."""
        return "another server"

    def submit(self, prompt: Prompt, params: SamplingParams, salt: bytes = b"") -> int:
        """See Answering. Raises: LocalLLMError for what the server refuses."""
        if not isinstance(prompt, _RemotePrompt) or prompt.num_said:
            raise RequestError(
                "a remote answer cannot be continued", hint="/regen asks for another"
            )
        body = {**prompt.body, **self._fields(params), "model": self._model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        reader = _Reader(self._endpoint.request(prompt.path, body))
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._requests[request_id] = _Open(reader)
        return request_id

    def events(self, request_id: int) -> EventStream:
        """See Answering."""
        return EventStream(self, request_id)

    def take(self, request_id: int) -> TextEvent | None:
        """See Answering."""
        inbox = self._requests[request_id].inbox
        return inbox.popleft() if inbox else None

    def is_open(self, request_id: int) -> bool:
        """See Answering."""
        return self._requests[request_id].is_open

    def forget(self, request_id: int) -> None:
        """See Answering."""
        self._requests.pop(request_id).reader.leave()

    def usage(self, request_id: int) -> Usage | None:
        """What the server counted, if it tells."""
        return self._requests[request_id].usage

    def prompt_progress(self, request_id: int) -> tuple[int, int] | None:
        """See Answering: unknown."""
        return None

    def said(self, prompt: Prompt) -> Split:
        """See Answering: nothing."""
        return Split()

    def step(self) -> None:
        """Wait a little for what comes. Raises: LocalLLMError."""
        for opened in list(self._requests.values()):
            try:
                self._advance(opened)
            except LocalLLMError:
                opened.is_open = False
                opened.reader.leave()
                raise

    def work_ahead(self) -> bool:
        """See Answering."""
        return False

    def finish(self) -> None:
        """See Answering."""
        for opened in self._requests.values():
            opened.reader.leave()

    def _fields(self, params: SamplingParams) -> dict[str, Any]:
        usual = SamplingParams()
        asked = self.given | {
            each.name
            for each in fields(SamplingParams)
            if getattr(params, each.name) != getattr(usual, each.name)
        }
        body = {name: getattr(params, name) for name in (*_OPENAI, *_OTHERS) if name in asked}
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

    def _advance(self, opened: _Open) -> None:
        try:
            arrived = opened.reader.take()
        except Empty:
            # Counted in looks: a program that was stopped for an hour has heard nothing of it.
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
            raise LocalLLMError("the server ended its answer in the middle", hint="ask again")
        opened.inbox.append(opened.last)

    def _book(self, opened: _Open, arrived: _Arrived) -> None:
        chunk, time_s = arrived.chunk, arrived.time_s
        opened.usage = chunk.usage or opened.usage
        if chunk.finish_reason is not None:
            reason = _REASONS.get(chunk.finish_reason, FinishReason.STOP)
            opened.last = _event(chunk.text, chunk.thinking, reason, time_s)
        elif chunk.text or chunk.thinking:
            opened.inbox.append(_event(chunk.text, chunk.thinking, None, time_s))


@dataclass(frozen=True, slots=True)
class RemoteModel(LoadedModel):
    """A model that a server has."""

    @property
    def prompts(self) -> PromptWriter:
        """See LoadedModel."""
        engine = self.text_engine
        return _RemotePrompts(engine.tokenizer, engine.context_length, engine.way_to_longer_context)

    def sampling_params(self, **given: Any) -> SamplingParams:
        """See LoadedModel: what is not given is the server's to say."""
        assert isinstance(self.text_engine, RemoteEngine)
        self.text_engine.given = frozenset(given)
        return SamplingParams(**given)

    def stream(self, prompt: Prompt, params: SamplingParams) -> tuple[Completion, EventStream]:
        """See LoadedModel."""
        engine = self.text_engine
        assert isinstance(engine, RemoteEngine)
        if params.logprobs is not None:
            raise RequestError("--logprobs and --remote exclude each other", param="logprobs")
        completion, events = LoadedModel.stream(self, prompt, params)
        completion.is_remote = True

        def count(event: TextEvent) -> None:
            usage = engine.usage(events.request_id)
            if event.finish_reason is not None and usage is not None:
                completion.num_prompt_tokens = usage.prompt_tokens or 0
                completion.num_cached_tokens = usage.cached_tokens or 0
                completion.num_counted_tokens = usage.completion_tokens

        events.on_event.append(count)
        return completion, events


def open_remote(url: str, model: str | None, api_key: str | None) -> RemoteModel:
    """The model that a server calls `model`, or its first.

    Raises: LocalLLMError where no such server answers, or it has no such model.
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
            f"{endpoint.url} does not answer as an OpenAI-compatible server",
            where=f"GET /v1/models: max_model_len is {length!r:.40}",
        )
    engine = RemoteEngine(endpoint, name, length)
    return RemoteModel(name, engine, GenerationDefaults({}, ()), time.monotonic() - began_s)


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
