"""An engine that speaks text: tokens become pieces of text, stop strings end a sample."""

import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from localllm.answer.completion import TextEvent, TokenInfo
from localllm.engine.request import FinishReason, TokenEvent
from localllm.engine.sampling_params import SamplingParams
from localllm.text.grammar import Grammar
from localllm.text.prompt import Prompt
from localllm.text.stop_strings import StopMatcher
from localllm.text.thinking import Split, ThinkingSplitter
from localllm.text.tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from localllm.answer.grammar_compiler import CompiledForm, GrammarCompiler
    from localllm.engine.engine import Engine


class TextEngine:
    """An engine with its tokenizer: requests in, text events out.

    Any number of requests can be in flight; whoever reads one drives them all. Not thread-safe.
    """

    def __init__(self, engine: "Engine", tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = Lock()
        self._assemblers: dict[tuple[int, int], _TextAssembler] = {}
        self._inboxes: dict[int, deque[TextEvent]] = {}

    @property
    def context_length(self) -> int:
        """See Engine."""
        return self.engine.context_length

    @property
    def way_to_longer_context(self) -> str:
        """See Engine."""
        return self.engine.way_to_longer_context

    def finish(self) -> None:
        """See Engine."""
        self.engine.finish()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        salt: bytes = b"",
        form: "CompiledForm | None" = None,
    ) -> int:
        """Queue a request; its id is for `events` and `abort`; `salt`: see Engine.add_request.

        `form`: of its grammar, where it has been compiled. Raises: RequestError.
        """
        matcher = None
        if params.grammar is not None:
            matcher, prompt = form or self.compile(params.grammar, prompt)
        request_id = self.engine.add_request(prompt.token_ids, params, salt, matcher)
        for sample in range(params.n):
            self._assemblers[request_id, sample] = _TextAssembler(self.tokenizer, prompt, params)
        self._inboxes[request_id] = deque()
        return request_id

    def compile(self, grammar: Grammar, prompt: Prompt) -> "CompiledForm":
        """What leads the answer of one request; any thread may call it. Raises: RequestError."""
        return self.prepare_grammars().compile(grammar, prompt)

    def prepare_grammars(self) -> "GrammarCompiler":
        """Read the vocabulary for grammars, which takes a large one a second; only once."""
        with self._grammars_lock:
            if self._grammars is None:
                from localllm.answer.grammar_compiler import GrammarCompiler  # few need it

                limits = self.engine.limits
                known = limits.vocab_size, limits.eos_token_ids
                self._grammars = GrammarCompiler(self.tokenizer, *known, tries=True)
            return self._grammars

    def said(self, prompt: Prompt) -> Split:
        """See `said_in`."""
        return said_in(prompt, self.tokenizer)

    def events(self, request_id: int) -> "EventStream":
        """The events of a request as they come, to its end."""
        return EventStream(self, request_id)

    def take(self, request_id: int) -> TextEvent | None:
        """The next event of a request that has come, if any."""
        inbox = self._inboxes[request_id]
        return inbox.popleft() if inbox else None

    def forget(self, request_id: int) -> None:
        """Abort a request if it still runs, and drop what nobody took."""
        self.abort(request_id)
        del self._inboxes[request_id]

    def abort(self, request_id: int) -> None:
        """End a request within this step; its last events go to its inbox."""
        for event in self.engine.abort(request_id):
            self._deliver(event)

    def is_open(self, request_id: int) -> bool:
        """Whether more events of a request are to come."""
        return any(key[0] == request_id for key in self._assemblers)

    def prompt_progress(self, request_id: int) -> tuple[int, int] | None:
        """See Engine."""
        return self.engine.prompt_progress(request_id)

    def step(self) -> None:
        """Compute one batch and put its events into their inboxes."""
        for event in self.engine.step():
            self._deliver(event)

    def work_ahead(self) -> bool:
        """See Engine."""
        return self.engine.work_ahead()

    def _deliver(self, event: TokenEvent) -> None:
        key = (event.request_id, event.sample)
        assembler = self._assemblers.get(key)
        if assembler is None:
            return  # it ended with an event before this one
        split = Split()
        finish_reason = event.finish_reason
        if event.token_id is not None and finish_reason is not FinishReason.STOP:
            split = assembler.push(event.token_id)
        if assembler.has_stopped:
            if finish_reason is None:
                self.engine.abort(event.request_id, event.sample)
            finish_reason = FinishReason.STOP
        elif finish_reason is not None:
            rest = assembler.flush()
            split = Split(split.thinking + rest.thinking, split.answer + rest.answer)
            if assembler.has_stopped:
                finish_reason = FinishReason.STOP
        if finish_reason is not None:
            del self._assemblers[key]
        token = None
        if event.token_id is not None:
            token = TokenInfo(event.token_id, event.logprobs, event.is_draft)
        self._inboxes[event.request_id].append(
            TextEvent(
                sample=event.sample,
                text=split.answer,
                thinking=split.thinking,
                token=token,
                finish_reason=finish_reason,
                error=event.error,
                num_cached_tokens=event.num_cached_tokens,
                num_drafted_tokens=event.num_drafted_tokens,
                time_s=time.monotonic(),
                stop_string=assembler.stopped_by,
            )
        )


def said_in(prompt: Prompt, tokenizer: Tokenizer) -> Split:
    """The part of the answer that is in a prompt already, as its events gave it out."""
    return _TextAssembler(tokenizer, prompt, SamplingParams()).said


class Answering(Protocol):
    """An engine that speaks text, wherever it is."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's own."""

    @property
    def context_length(self) -> int:
        """The longest request, prompt and answer together."""

    @property
    def way_to_longer_context(self) -> str:
        """What a user can do for a longer one."""

    def submit(self, prompt: Prompt, params: SamplingParams, salt: bytes = b"") -> int:
        """Queue a request; its id is for the others. Raises: RequestError."""

    def events(self, request_id: int) -> "EventStream":
        """The events of a request as they come, to its end."""

    def take(self, request_id: int) -> TextEvent | None:
        """The next event of a request that has come, if any."""

    def forget(self, request_id: int) -> None:
        """Abort a request if it still runs, and drop what nobody took."""

    def is_open(self, request_id: int) -> bool:
        """Whether more events of a request are to come."""

    def prompt_progress(self, request_id: int) -> tuple[int, int] | None:
        """Tokens of a request's prompt that are computed, and all of them; None once it ended."""

    def said(self, prompt: Prompt) -> Split:
        """See `said_in`."""

    def step(self) -> None:
        """Bring what comes next."""

    def work_ahead(self) -> bool:
        """Do a little of what makes later steps faster; False where nothing is left to do."""

    def finish(self) -> None:
        """End all requests, and save what is to be kept."""


class EventStream:
    """Iterates over one request's events; each `next` drives the engine until there is one.

    Closing it, or dropping it, aborts the request; what `on_close` holds is called then, once.
    `should_stop` is asked between steps, so that a long prompt can be stopped too.
    """

    def __init__(self, engine: Answering, request_id: int) -> None:
        self._engine, self.request_id = engine, request_id
        self._is_closed = False
        self.on_event: list[Callable[[TextEvent], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self.should_stop: Callable[[], bool] = lambda: False

    def __iter__(self) -> "EventStream":
        return self

    def __next__(self) -> TextEvent:
        while not self._is_closed:
            event = self._engine.take(self.request_id)
            if event is not None:
                for book in self.on_event:
                    book(event)
                return event
            if self.should_stop() or not self._engine.is_open(self.request_id):
                self.close()
            else:
                self._engine.step()
        raise StopIteration

    def prompt_progress(self) -> tuple[int, int] | None:
        """Tokens of the prompt that are computed, and all of them; None once it has ended."""
        return None if self._is_closed else self._engine.prompt_progress(self.request_id)

    def close(self) -> None:
        """Abort the request if it still runs."""
        if not self._is_closed:
            self._is_closed = True
            self._engine.forget(self.request_id)
            for call in self.on_close:
                call()

    def __del__(self) -> None:
        self.close()


class _TextAssembler:
    """One sample's tokens to text: characters made whole, thoughts split off, stop strings held.

    A stop string ends the answer; in the thoughts it is a text like any other.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams) -> None:
        context = prompt.context
        if params.grammar is not None and not context:
            # A space that the form begins with is kept: many vocabularies drop the first of a text.
            context = tokenizer.letter
        self._decoder = StreamDecoder(tokenizer, prompt.shown, context)
        self._splitter = ThinkingSplitter(prompt.markers, prompt.is_thinking)
        self._matcher = StopMatcher(params.stop)
        # Stop strings are looked for in what is new: those that ended nothing so far were not
        # there, or not asked for.
        said = [self._splitter.push(self._decoder.push(token_id)) for token_id in prompt.said]
        self.said = Split("".join(s.thinking for s in said), "".join(s.answer for s in said))

    @property
    def has_stopped(self) -> bool:
        return self._matcher.has_stopped

    @property
    def stopped_by(self) -> str | None:
        return self._matcher.stopped_by

    def push(self, token_id: int) -> Split:
        return self._match(self._splitter.push(self._decoder.push(token_id)))

    def flush(self) -> Split:
        last = self._match(self._splitter.push(self._decoder.flush()))
        rest = self._match(self._splitter.flush())
        answer = last.answer + rest.answer + self._matcher.flush()
        return Split(last.thinking + rest.thinking, answer)

    def _match(self, split: Split) -> Split:
        return Split(split.thinking, self._matcher.push(split.answer))
