"""An engine with text output: tokens become pieces of text, stop strings end a sample."""

import time
from collections import deque
from threading import Lock
from typing import TYPE_CHECKING, Protocol

from localllm.answer.completion import TextEvent, TokenInfo
from localllm.answer.event_stream import EventSource
from localllm.errors import RequestError
from localllm.schedule.prompt_progress import PromptProgress
from localllm.schedule.request import FinishReason, TokenEvent
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.context import Context
from localllm.text.grammar import Grammar
from localllm.text.prompt import Prompt
from localllm.text.stop_strings import StopMatcher
from localllm.text.thinking import Split, ThinkingSplitter
from localllm.text.tokenizer import StreamDecoder, Tokenizer

if TYPE_CHECKING:
    from localllm.answer.grammar_compiler import CompiledForm, GrammarCompiler
    from localllm.engine.engine import Engine


class TextSource(EventSource, Protocol):
    """An engine with text input and output, in this process or in another one."""

    tokenizer: Tokenizer

    @property
    def context(self) -> Context:
        """How much it reads and writes in one request."""

    def submit(self, prompt: Prompt, params: SamplingParams, salt: bytes = b"") -> int:
        """Queue a request, and return its id for the other methods. Raises: RequestError."""

    def work_ahead(self) -> bool:
        """See Engine; False if there is nothing to do here."""
        return False

    def finish(self) -> None:
        """End all requests, and save the cached prefixes."""


class TextEngine(TextSource):
    """An engine with its tokenizer: requests in, text events out.

    Any number of requests can be in flight; reading one drives them all. Not thread-safe.
    """

    def __init__(self, engine: "Engine", tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self._grammars: GrammarCompiler | None = None
        self._grammars_lock = Lock()
        self._assemblers: dict[tuple[int, int], _TextAssembler] = {}
        self._inboxes: dict[int, deque[TextEvent]] = {}

    @property
    def context(self) -> Context:
        return self.engine.context

    def finish(self) -> None:
        self.engine.finish()

    def submit(
        self,
        prompt: Prompt,
        params: SamplingParams,
        salt: bytes = b"",
        form: "CompiledForm | None" = None,
    ) -> int:
        """Queue a request, and return its id for the other methods.

        `salt`: see Engine.add_request; `form`: its grammar, if that is compiled already. Raises:
        RequestError.
        """
        self._check_tokens(prompt)
        matcher = None
        if params.grammar is not None:
            matcher, prompt = form or self.compile(params.grammar, prompt)
        request_id = self.engine.add_request(
            prompt.token_ids, params, salt, matcher, prompt.borders, prompt.num_to_keep
        )
        try:
            for sample in range(params.n):
                assembler = _TextAssembler(self.tokenizer, prompt, params)
                self._assemblers[request_id, sample] = assembler
        except RequestError:  # the tokens of the prompt have no text
            self.engine.abort(request_id)
            raise
        self._inboxes[request_id] = deque()
        return request_id

    def _check_tokens(self, prompt: Prompt) -> None:
        """Raises: RequestError for a token that the tokenizer has and the model does not."""
        num_rows = self.engine.limits.vocab_size
        beyond = next((i for i in prompt.token_ids if i >= num_rows), None)
        text = None if beyond is None else self.tokenizer.token_text(beyond)
        if text is not None:
            raise RequestError(
                f"the prompt holds {text!r:.80}, which is not among the model's tokens",
                param="prompt",
                where=f"token {beyond} of the tokenizer; the model has 0 to {num_rows - 1}",
                hint="a prompt or a chat template without it",
            )

    def compile(self, grammar: Grammar, prompt: Prompt) -> "CompiledForm":
        """Compile the grammar of one answer; any thread may call it. Raises: RequestError."""
        return self.prepare_grammars().compile(grammar, prompt)

    def prepare_grammars(self) -> "GrammarCompiler":
        """Read the vocabulary for grammars, once; for a large one, this takes a second."""
        with self._grammars_lock:
            if self._grammars is None:
                from localllm.answer.grammar_compiler import GrammarCompiler  # rarely needed

                limits = self.engine.limits
                known = limits.vocab_size, limits.eos_token_ids
                self._grammars = GrammarCompiler(self.tokenizer, *known, tries=True)
            return self._grammars

    def take(self, request_id: int) -> TextEvent | None:
        inbox = self._inboxes[request_id]
        return inbox.popleft() if inbox else None

    def forget(self, request_id: int) -> None:
        self.abort(request_id)
        del self._inboxes[request_id]

    def abort(self, request_id: int) -> None:
        """Abort a request at once; its last events go to its inbox."""
        for event in self.engine.abort(request_id):
            self._deliver(event)

    def is_open(self, request_id: int) -> bool:
        return any(key[0] == request_id for key in self._assemblers)

    def prompt_progress(self, request_id: int) -> PromptProgress | None:
        return self.engine.prompt_progress(request_id)

    def step(self) -> None:
        """Compute one batch and put its events into their inboxes."""
        for event in self.engine.step():
            self._deliver(event)

    def work_ahead(self) -> bool:
        return self.engine.work_ahead()

    def _deliver(self, event: TokenEvent) -> None:
        key = (event.request_id, event.sample)
        assembler = self._assemblers.get(key)
        if assembler is None:
            return  # an earlier event ended it
        try:
            split, finish_reason = assembler.take(event)
        except RequestError as error:  # the tokens have no text
            split, finish_reason = Split(), FinishReason.ERROR
            event = event._replace(error=error)
        if finish_reason is not None:
            del self._assemblers[key]
            if event.finish_reason is None:
                for ended in self.engine.abort(event.request_id, event.sample):
                    event = event._replace(drafts=ended.drafts)
        token = None
        if event.token_id is not None and event.error is None:
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
                pooled=event.pooled,
                drafts=event.drafts,
                prompt_scores=event.prompt_scores,
            )
        )


def said_in(prompt: Prompt, tokenizer: Tokenizer) -> Split:
    """The part of the answer that is already in a prompt, as its events returned it."""
    return _TextAssembler(tokenizer, prompt, SamplingParams()).said


class _TextAssembler:
    """Turns one sample's tokens into text: completes characters, splits off thoughts, holds back
    stop strings.

    A stop string ends the answer; in thoughts it is ordinary text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Prompt, params: SamplingParams) -> None:
        context = prompt.context
        if params.grammar is not None and not context:
            # Keeps a space that the form begins with: many vocabularies drop a text's first space.
            context = tokenizer.letter
        self._decoder = StreamDecoder(tokenizer, prompt.shown, context)
        self._splitter = ThinkingSplitter(prompt.markers, prompt.is_thinking)
        self._matcher = StopMatcher(params.stop)
        # Stop strings are searched for in new text only: the earlier part held none, or they were
        # not set then.
        said = [self._splitter.push(self._decoder.push(token_id)) for token_id in prompt.said]
        self.said = Split("".join(s.thinking for s in said), "".join(s.answer for s in said))

    @property
    def stopped_by(self) -> str | None:
        return self._matcher.stopped_by

    def take(self, event: TokenEvent) -> tuple[Split, FinishReason | None]:
        """The text that an event completes, and whether and why it is the last. Raises:
        RequestError for tokens without a text.
        """
        finish_reason, split = event.finish_reason, Split()
        if event.token_id is not None and finish_reason is not FinishReason.STOP:
            split = self.push(event.token_id)
        if finish_reason is not None and not self._matcher.has_stopped:
            rest = self.flush()
            split = Split(split.thinking + rest.thinking, split.answer + rest.answer)
        return split, FinishReason.STOP if self._matcher.has_stopped else finish_reason

    def push(self, token_id: int) -> Split:
        return self._match(self._splitter.push(self._decoder.push(token_id)))

    def flush(self) -> Split:
        last = self._match(self._splitter.push(self._decoder.flush()))
        rest = self._match(self._splitter.flush())
        answer = last.answer + rest.answer + self._matcher.flush()
        return Split(last.thinking + rest.thinking, answer)

    def _match(self, split: Split) -> Split:
        return Split(split.thinking, self._matcher.push(split.answer))
