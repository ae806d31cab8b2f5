"""The seam between faces and engine: a model opened by name, text in, text pieces out.

`chat`, the server and the Python API all go through `TextEngine`; the engine below knows only
token ids, the faces above only text.
"""

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from localllm.catalog import BUILT_IN_MODEL, resolve_model
from localllm.config import EngineConfig, SamplingParams
from localllm.download import fetch_model
from localllm.engine.engine import Engine
from localllm.engine.loading import load_engine, read_model_config
from localllm.engine.request import FinishReason, TokenEvent, TokenLogprobs
from localllm.errors import CheckpointError, ContextLengthError, RequestError
from localllm.generation_config import GenerationDefaults, read_generation_config
from localllm.stop_strings import StopMatcher
from localllm.tokenizer import Message, StreamDecoder, Tokenizer


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One generated token; `logprobs` where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of one sample's text. The last event of a sample carries its finish reason.

    A token may bring no text (half a character, the start of a stop string) and text may come
    without a token (what was held back, at the end). `time_s` is on the monotonic clock.
    """

    request_id: int
    sample: int
    text: str
    token: TokenInfo | None
    finish_reason: FinishReason | None
    error: RequestError | None
    num_cached_tokens: int
    time_s: float


@dataclass(slots=True)
class Sample:
    """One finished, or so far unfinished, answer."""

    text: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: RequestError | None = None


@dataclass(slots=True)
class Completion:
    """What came back for one prompt, with what it took; times in seconds."""

    num_prompt_tokens: int
    started_s: float
    samples: list[Sample]
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first sample ended; None while it has not."""
        return self.samples[0].finish_reason

    @property
    def error(self) -> RequestError | None:
        """What was wrong with this prompt, if anything; others are not touched."""
        return self.samples[0].error

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all samples."""
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def ttft_s(self) -> float:
        """Time to first token, 0 where none came."""
        return 0.0 if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Computed prompt tokens over the time to the first token."""
        computed = self.num_prompt_tokens - self.num_cached_tokens
        return computed / self.ttft_s if self.ttft_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first over the time they took."""
        if self.first_token_s is None or self.last_token_s == self.first_token_s:
            return 0.0
        assert self.last_token_s is not None
        return (self.num_generated_tokens - 1) / (self.last_token_s - self.first_token_s)

    def add(self, event: TextEvent) -> None:
        """Book one event."""
        sample = self.samples[event.sample]
        sample.text += event.text
        if event.token is not None:
            sample.tokens.append(event.token)
            self.first_token_s = self.first_token_s or event.time_s
            self.last_token_s = event.time_s
            self.num_cached_tokens = event.num_cached_tokens
        if event.finish_reason is not None:
            sample.finish_reason, sample.error = event.finish_reason, event.error


class TextEngine:
    """An engine with its tokenizer: requests in, text events out.

    Any number of requests can be in flight; whoever reads one drives them all. Not thread-safe.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._assemblers: dict[tuple[int, int], _TextAssembler] = {}
        self._inboxes: dict[int, deque[TextEvent]] = {}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt. Raises: ContextLengthError early for one that is far too long."""
        limit = self.engine.context_length
        if len(text) > 64 * limit:
            num_tokens = self.tokenizer.count_at_least(text, limit)
            if num_tokens > limit:
                raise ContextLengthError(
                    f"the prompt has over {num_tokens:,} tokens, the context {limit:,}",
                    param="prompt",
                    hint="a shorter prompt, or a larger --ctx",
                )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def submit(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request; its id is for `events` and `abort`. Raises: RequestError."""
        request_id = self.engine.add_request(prompt_token_ids, params)
        for sample in range(params.n):
            self._assemblers[request_id, sample] = _TextAssembler(self.tokenizer, params)
        self._inboxes[request_id] = deque()
        return request_id

    def events(self, request_id: int) -> Iterator[TextEvent]:
        """The events of a request as they come, to its end. Closing the iterator aborts it."""
        inbox = self._inboxes[request_id]
        try:
            while inbox or self._is_open(request_id):
                if inbox:
                    yield inbox.popleft()
                else:
                    self._step()
        finally:
            self.abort(request_id)
            del self._inboxes[request_id]

    def abort(self, request_id: int) -> None:
        """End a request within this step; its last events go to its inbox."""
        for event in self.engine.abort(request_id):
            self._deliver(event)

    def _is_open(self, request_id: int) -> bool:
        return any(key[0] == request_id for key in self._assemblers)

    def _step(self) -> None:
        for event in self.engine.step():
            self._deliver(event)

    def _deliver(self, event: TokenEvent) -> None:
        key = (event.request_id, event.sample)
        assembler = self._assemblers[key]
        text = ""
        finish_reason = event.finish_reason
        if event.token_id is not None and finish_reason is not FinishReason.STOP:
            text = assembler.push(event.token_id)
        if assembler.has_stopped:
            if finish_reason is None:
                self.engine.abort(event.request_id, event.sample)
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            text += assembler.flush()
        if finish_reason is not None:
            del self._assemblers[key]
        token = None
        if event.token_id is not None:
            token = TokenInfo(event.token_id, event.logprobs)
        self._inboxes[event.request_id].append(
            TextEvent(
                request_id=event.request_id,
                sample=event.sample,
                text=text,
                token=token,
                finish_reason=finish_reason,
                error=event.error,
                num_cached_tokens=event.num_cached_tokens,
                time_s=time.monotonic(),
            )
        )


class _TextAssembler:
    """One sample's tokens to text, stop strings held back."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self._decoder = StreamDecoder(tokenizer)
        self._matcher = StopMatcher(params.stop)

    @property
    def has_stopped(self) -> bool:
        return self._matcher.has_stopped

    def push(self, token_id: int) -> str:
        return self._matcher.push(self._decoder.push(token_id))

    def flush(self) -> str:
        return self._matcher.push(self._decoder.flush()) + self._matcher.flush()


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to answer."""

    name: str
    text_engine: TextEngine
    defaults: GenerationDefaults
    load_s: float

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""
        return self.text_engine.tokenizer

    @property
    def context_length(self) -> int:
        """Tokens that prompt and answer have together."""
        return self.text_engine.engine.context_length

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The model's defaults (`generation_config.json`) with what is given over them.

        Raises: RequestError for a value out of range.
        """
        return SamplingParams(**{**self.defaults.sampling, **given})

    def prompt_ids(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt that is completed as it stands."""
        if isinstance(prompt, str):
            return self.text_engine.encode(prompt, add_special_tokens=True)
        return list(prompt)

    def chat_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation; a model without a template reads the messages' text."""
        if not self.tokenizer.has_chat_template:
            text = "\n\n".join(str(message["content"]) for message in messages)
            return self.prompt_ids(text)
        text = self.tokenizer.render_chat(messages, tools, **variables)
        return self.text_engine.encode(text, add_special_tokens=False)

    def stream(
        self, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> tuple[Completion, Iterator[TextEvent]]:
        """Start one request: its growing completion, and the events that make it grow.

        Closing the iterator aborts the request. Raises: RequestError.
        """
        samples = [Sample() for _ in range(params.n)]
        completion = Completion(len(prompt_token_ids), time.monotonic(), samples)
        request_id = self.text_engine.submit(prompt_token_ids, params)
        return completion, self._booked(completion, request_id)

    def _booked(self, completion: Completion, request_id: int) -> Iterator[TextEvent]:
        for event in self.text_engine.events(request_id):
            completion.add(event)
            yield event

    def complete(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams
    ) -> list[Completion]:
        """Run many prompts together, in one batch as far as it goes.

        A prompt that is refused gives a completion with `error` set; the others go on.
        """
        completions: list[Completion] = []
        streams: list[Iterator[TextEvent]] = []
        for prompt in prompts:
            try:
                completion, events = self.stream(prompt, params)
                streams.append(events)
            except RequestError as error:
                refused = [
                    Sample(finish_reason=FinishReason.ERROR, error=error) for _ in range(params.n)
                ]
                completion = Completion(len(prompt), time.monotonic(), refused)
            completions.append(completion)
        for events in streams:
            deque(events, maxlen=0)
        return completions


class ChatSession:
    """A conversation: the messages so far, and replies that are added to them."""

    def __init__(self, model: LoadedModel, system: str | None = None) -> None:
        self.model = model
        self.messages: list[dict[str, str]] = []
        if system is not None:
            self.messages.append({"role": "system", "content": system})

    def reply(self, text: str, params: SamplingParams) -> tuple[Completion, Iterator[TextEvent]]:
        """Ask `text`. The answer joins the history as far as it was read, also when interrupted.

        A model without a chat template completes `text` alone. Raises: RequestError.
        """
        asked = {"role": "user", "content": text}
        history = [*self.messages, asked] if self.model.tokenizer.has_chat_template else [asked]
        completion, events = self.model.stream(self.model.chat_ids(history), params)
        return completion, self._remembered(asked, completion, events)

    def _remembered(
        self, asked: dict[str, str], completion: Completion, events: Iterator[TextEvent]
    ) -> Iterator[TextEvent]:
        try:
            yield from events
        finally:
            answer = {"role": "assistant", "content": completion.text}
            self.messages += [asked, answer]


def open_model(name: str | None = None, config: EngineConfig | None = None) -> LoadedModel:
    """Find, fetch if need be, check and load a model; None is the built-in one.

    Raises: CatalogError, DownloadError, CheckpointError, GpuMemoryError, BackendError.
    """
    started = time.monotonic()
    config = config or EngineConfig()
    source = resolve_model(name or BUILT_IN_MODEL)
    if source.name == BUILT_IN_MODEL and config.dtype == "auto":
        # So that the exactness contract holds as it comes; see docs/architecture.md.
        config = replace(config, dtype="float32")
    folder = fetch_model(source)
    model_config, spec = read_model_config(folder)
    defaults = read_generation_config(folder)
    tokenizer = Tokenizer.from_folder(folder)
    # Every place that names an end token counts; they need not agree.
    eos = {*defaults.eos_token_ids, *model_config.eos_token_ids}
    if tokenizer.eos_token_id is not None:
        eos.add(tokenizer.eos_token_id)
    _check_vocabulary(folder, tokenizer, model_config.vocab_size, eos)
    loaded = load_engine(folder, model_config, spec, config, frozenset(eos))
    return LoadedModel(
        name=source.name,
        text_engine=TextEngine(loaded.engine, tokenizer),
        defaults=defaults,
        load_s=time.monotonic() - started,
    )


def _check_vocabulary(folder: Path, tokenizer: Tokenizer, vocab_size: int, eos: set[int]) -> None:
    """The head may be larger than the tokenizer (padding), never smaller."""
    if tokenizer.num_token_ids > vocab_size:
        raise CheckpointError(
            f"the tokenizer has token ids up to {tokenizer.num_token_ids - 1}, "
            f"the model's head only {vocab_size} rows",
            where=str(folder),
            hint="tokenizer.json and config.json are of different models or revisions",
        )
    for token_id in sorted(eos):
        if token_id >= vocab_size:
            raise CheckpointError(
                f"end token {token_id} is none of the model's 0 to {vocab_size - 1}",
                where=str(folder / "generation_config.json"),
                hint="the config files are of different models or revisions",
            )
