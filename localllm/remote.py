"""A model behind an OpenAI-compatible server, ours or another's, as one that is ready to answer.

What is known here is text: the server has the tokenizer, and a token is whatever comes at once.
"""

import http.client
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import urlsplit

from localllm.completion import Completion, TextEvent, TokenInfo
from localllm.config import SamplingParams
from localllm.engine.request import FinishReason
from localllm.errors import ContextLengthError, ExitCode, LocalLLMError, RequestError
from localllm.generation_config import GenerationDefaults
from localllm.loaded_model import LoadedModel
from localllm.overflow import UNKNOWN_CONTEXT
from localllm.prompt import Prompt, ThinkLevel
from localllm.prompt_writer import PromptWriter
from localllm.text_engine import EventStream
from localllm.thinking import Split
from localllm.tokenizer import Message, Tokenizer

_TIMEOUT_S = 600
# A look at what has come, so that Ctrl-C is heard.
_LOOK_S = 0.05
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
        messages: Sequence[Message],
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
class _Line:
    """What a server sent, and when it was here."""

    text: str
    time_s: float


@dataclass(slots=True)
class _Open:
    """A request: the lines that come in, and what they became. `last` waits for the usage."""

    lines: "SimpleQueue[_Line | LocalLLMError | None]"
    close: Callable[[], None]
    inbox: deque[TextEvent] = field(default_factory=deque)
    last: TextEvent | None = None
    usage: Mapping[str, Any] = field(default_factory=dict)
    is_open: bool = True


class RemoteEngine:
    """See Answering. One thread calls it."""

    def __init__(self, url: str, model: str, api_key: str | None, context_length: int) -> None:
        self._url, self._model, self._api_key = url, model, api_key
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
                "an answer of a server cannot be gone on with", hint="/regen asks for another"
            )
        body = {**prompt.body, **self._fields(params), "model": self._model, "stream": True}
        body["stream_options"] = {"include_usage": True}
        answer = send(self._url + prompt.path, self._api_key, body)
        lines: SimpleQueue[_Line | LocalLLMError | None] = SimpleQueue()
        threading.Thread(target=_read, args=(answer, lines), daemon=True).start()
        request_id, self._next_id = self._next_id, self._next_id + 1
        self._requests[request_id] = _Open(lines, lambda: _hang_up(answer))
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
        self._requests.pop(request_id).close()

    def usage(self, request_id: int) -> Mapping[str, Any]:
        """What the server counted."""
        return self._requests[request_id].usage

    def prompt_progress(self, request_id: int) -> tuple[int, int] | None:
        """See Answering: unknown."""
        return None

    def said(self, prompt: Prompt) -> Split:
        """See Answering: nothing."""
        return Split()

    def step(self) -> None:
        """Wait a little for what comes. Raises: LocalLLMError."""
        for request_id, opened in list(self._requests.items()):
            try:
                line = opened.lines.get(timeout=_LOOK_S)
            except Empty:
                continue
            if isinstance(line, LocalLLMError):
                opened.is_open = False
                raise line
            if line is not None:
                self._book(request_id, opened, line)
                continue
            opened.is_open = False
            if opened.last is None:
                raise LocalLLMError("the server ended its answer in the middle", hint="ask again")
            opened.inbox.append(opened.last)

    def work_ahead(self) -> bool:
        """See Answering."""
        return False

    def finish(self) -> None:
        """See Answering."""
        for opened in self._requests.values():
            opened.close()

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

    def _book(self, request_id: int, opened: _Open, line: _Line) -> None:
        name, _, value = line.text.partition(":")
        if name != "data" or value.strip() == "[DONE]":
            return
        try:
            chunk = json.loads(value)
            if "error" in chunk:
                raise _refusal(chunk, 500)
            opened.usage = chunk.get("usage") or opened.usage
            choices = chunk.get("choices") or []
            if not choices:
                return
            choice = choices[0]
            delta = choice.get("delta") or {}
            text = delta.get("content") or choice.get("text") or ""
            thinking = delta.get("reasoning_content") or delta.get("reasoning") or ""
            reason = choice.get("finish_reason")
        except (ValueError, AttributeError, LookupError, TypeError) as error:
            raise LocalLLMError(
                "the server does not answer as an OpenAI-compatible one", where=f"{error!s:.200}"
            ) from error
        if reason is not None:
            known = _REASONS.get(reason, FinishReason.STOP)
            opened.last = _event(request_id, text, thinking, known, line.time_s)
        elif text or thinking:
            opened.inbox.append(_event(request_id, text, thinking, None, line.time_s))


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
            usage = engine.usage(event.request_id)
            if event.finish_reason is not None and usage:
                details = usage.get("prompt_tokens_details") or {}
                completion.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
                completion.num_cached_tokens = int(details.get("cached_tokens") or 0)
                counted = usage.get("completion_tokens")
                completion.num_counted_tokens = counted if isinstance(counted, int) else None

        events.on_event.append(count)
        return completion, events


def open_remote(url: str, model: str | None, api_key: str | None) -> RemoteModel:
    """The model that a server calls `model`, or its first.

    Raises: LocalLLMError where no such server answers, or it has no such model.
    """
    began_s = time.monotonic()
    base = url.rstrip("/").removesuffix("/v1")
    if urlsplit(base).scheme not in ("http", "https") or not urlsplit(base).hostname:
        raise RequestError(
            f"--remote must be like http://127.0.0.1:8000, found {url!r:.100}", param="remote"
        )
    with send(base + "/v1/models", api_key) as answer:
        try:
            listed = {str(each["id"]): each for each in json.load(answer)["data"]}
            name = model or next(iter(listed))
        except (ValueError, LookupError, TypeError, StopIteration) as error:
            raise LocalLLMError(
                f"{base} does not answer as an OpenAI-compatible server",
                where=f"GET /v1/models: {error!s:.200}",
            ) from error
    if name not in listed:
        raise LocalLLMError(
            f"{base} has no model {name!r:.100}",
            hint=f"it has {', '.join(listed)}"[:300],
            exit_code=ExitCode.MODEL,
        )
    context = listed[name].get("max_model_len")
    length = context if isinstance(context, int) and context > 0 else UNKNOWN_CONTEXT
    engine = RemoteEngine(base, name, api_key, length)
    return RemoteModel(name, engine, GenerationDefaults({}, ()), time.monotonic() - began_s)


def send(url: str, api_key: str | None, body: Mapping[str, Any] | None = None) -> Any:
    """The open answer to a request. Raises: LocalLLMError."""
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers)
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(_read_json(error), error.code) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise LocalLLMError(
            f"{urlsplit(url).netloc} cannot be reached: {reason!s:.200}",
            hint="is it running, and is this its address?",
            exit_code=ExitCode.NETWORK,
        ) from error


def _read_json(answer: Any) -> Any:
    try:
        return json.loads(answer.read(1 << 20))
    except (OSError, ValueError, http.client.HTTPException):
        return {}


def _refusal(told: Any, status: int) -> LocalLLMError:
    """What a server says is wrong, as an error of ours."""
    error = told.get("error") if isinstance(told, dict) else None
    error = error if isinstance(error, dict) else {"message": error}
    message = f"the server refuses: {error.get('message') or f'status {status}'!s:.500}"
    if error.get("code") == "context_length_exceeded":
        return ContextLengthError(message)
    if status in (401, 403):
        return LocalLLMError(message, hint="--api-key KEY", exit_code=ExitCode.MODEL)
    if status == 404:
        return LocalLLMError(message, exit_code=ExitCode.MODEL)
    return RequestError(message) if 400 <= status < 500 else LocalLLMError(message)


def _read(answer: Any, lines: "SimpleQueue[_Line | LocalLLMError | None]") -> None:
    try:
        for line in answer:
            lines.put(_Line(line.decode("utf-8", "replace"), time.monotonic()))
    except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
        lines.put(LocalLLMError(f"the connection broke: {error!s:.200}", hint="ask again"))
    lines.put(None)


def _hang_up(answer: Any) -> None:
    """Let the server know that nobody reads: closing waits for who reads, in another thread."""
    with suppress(OSError, AttributeError):
        answer.fp.raw._sock.shutdown(socket.SHUT_RDWR)


def _event(
    request_id: int, text: str, thinking: str, reason: FinishReason | None, time_s: float
) -> TextEvent:
    token = TokenInfo(_CHUNK_ID, None, is_draft=False) if text or thinking else None
    return TextEvent(
        request_id=request_id,
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
