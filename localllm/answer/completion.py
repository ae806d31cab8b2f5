"""What comes back for a prompt: events while it grows, and the completion they add up to."""

from dataclasses import dataclass, field

from localllm.engine.request import FinishReason, TokenLogprobs
from localllm.errors import LocalLLMError, RequestError

# Characters of a text in a `repr`.
_SHOWN = 60
# Pieces that come faster than this one after the other were sent together.
_TOGETHER_S = 1e-4


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One generated token; `logprobs` where they were asked for. `is_draft`: it had been proposed
    before the model was asked.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    is_draft: bool


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of one sample's text. The last event of a sample carries its finish reason.

    `thinking` is text of the model's thoughts, `text` that of its answer. A token may bring no
    text (half a character, the start of a stop string) and text may come
    without a token (what was held back, at the end). `time_s` is on the monotonic clock.
    `stop_string` comes last as well: it cut the answer, and is no part of it.
    """

    sample: int
    text: str
    thinking: str
    token: TokenInfo | None
    finish_reason: FinishReason | None
    error: RequestError | None
    num_cached_tokens: int
    num_drafted_tokens: int
    time_s: float
    stop_string: str | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """What was left out of a prompt because the user wants that where it is too long."""

    num_turns: int
    num_tokens: int
    policy: str


@dataclass(slots=True)
class Sample:
    """One finished, or so far unfinished, answer."""

    text: str = ""
    thinking: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    num_drafted_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    error: LocalLLMError | None = None


@dataclass(slots=True, repr=False)
class Completion:
    """What came back for one prompt, with what it took; times in seconds."""

    num_prompt_tokens: int  # 0: it is a server's, which does not count for its clients
    started_s: float
    samples: list[Sample]
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    truncation: Truncation | None = None
    # What a server counted, whose events may hold several tokens.
    num_counted_tokens: int | None = None
    is_remote: bool = False

    def __repr__(self) -> str:
        """The beginning of its text, and what it took."""
        text = self.text if len(self.text) <= _SHOWN else f"{self.text[:_SHOWN]}…"
        parts = [repr(text)]
        parts += [f"samples={len(self.samples)}"] if len(self.samples) > 1 else []
        parts += [f"finish_reason={str(self.finish_reason)!r}"] if self.finish_reason else []
        parts += [f"error={str(self.error)!r:.80}"] if self.error is not None else []
        counts = f"prompt_tokens={self.num_prompt_tokens}, tokens={self.num_generated_tokens}"
        return f"Completion({', '.join([*parts, counts])})"

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.samples[0].text

    @property
    def thinking(self) -> str:
        """Thoughts of the first sample."""
        return self.samples[0].thinking

    @property
    def finish_reason(self) -> FinishReason | None:
        """Why the first sample ended; None while it has not."""
        return self.samples[0].finish_reason

    @property
    def stop_string(self) -> str | None:
        """What cut the first sample, if that was a stop string."""
        return self.samples[0].stop_string

    @property
    def error(self) -> LocalLLMError | None:
        """What was wrong with this prompt, if anything; others are not touched."""
        return self.samples[0].error

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all samples."""
        if self.num_counted_tokens is not None:
            return self.num_counted_tokens
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of prompt and answers; 0 where a server does not count those of the prompt."""
        return self.num_prompt_tokens and self.num_prompt_tokens + self.num_generated_tokens

    @property
    def num_drafted_tokens(self) -> int:
        """Tokens that were proposed, for all samples."""
        return sum(sample.num_drafted_tokens for sample in self.samples)

    @property
    def num_accepted_tokens(self) -> int:
        """Generated tokens that had been proposed, of all samples."""
        return sum(token.is_draft for sample in self.samples for token in sample.tokens)

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
        """Tokens after the first over the time they took; 0 where that is not known."""
        if self.first_token_s is None or self.last_token_s is None:
            return 0.0
        took = self.last_token_s - self.first_token_s
        num_pieces = sum(len(sample.tokens) for sample in self.samples)
        if took <= 0 or (self.is_remote and took < _TOGETHER_S * (num_pieces - 1)):
            return 0.0
        return (self.num_generated_tokens - 1) / took

    def add(self, event: TextEvent) -> None:
        """Book one event."""
        sample = self.samples[event.sample]
        sample.text += event.text
        sample.thinking += event.thinking
        if event.token is not None:
            sample.tokens.append(event.token)
            sample.num_drafted_tokens = event.num_drafted_tokens
            self.first_token_s = self.first_token_s or event.time_s
            self.last_token_s = event.time_s
            if event.sample == 0:  # the others share the blocks that it computed
                self.num_cached_tokens = event.num_cached_tokens
        if event.finish_reason is not None:
            sample.finish_reason, sample.error = event.finish_reason, event.error
            sample.stop_string = event.stop_string
