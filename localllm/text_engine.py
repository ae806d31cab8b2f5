"""An engine that speaks text: tokens become pieces of text, stop strings end a sample."""

import time
from collections import deque
from collections.abc import Sequence

from localllm.completion import TextEvent, TextEvents, TokenInfo
from localllm.config import SamplingParams
from localllm.engine.engine import Engine
from localllm.engine.request import FinishReason, TokenEvent
from localllm.errors import ContextLengthError
from localllm.stop_strings import StopMatcher
from localllm.tokenizer import StreamDecoder, Tokenizer


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

    def events(self, request_id: int) -> TextEvents:
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
