"""The result of a prompt: events while the answer grows, and the completion they add up to."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from localllm.errors import LocalLLMError, RequestError
from localllm.schedule.logprobs import TokenLogprobs, read_scores
from localllm.schedule.request import DraftCount, FinishReason
from localllm.text.prompt import Prompt
from localllm.text.thinking import Split

# Characters of a text in a `repr`.
_SHOWN = 60
# Pieces that follow each other faster than this were sent together.
_TOGETHER_S = 1e-4


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One generated token; `logprobs` if they were asked for; `is_draft`: it is an accepted draft
    token.
    """

    token_id: int
    logprobs: TokenLogprobs | None
    is_draft: bool


@dataclass(frozen=True, slots=True)
class TextEvent:
    """A piece of one sample's text. The last event of a sample carries its finish reason.

    `thinking` is text of the model's thoughts, `text` that of its answer. A token may come without
    text (half a character, the start of a stop string), and text without a token (at the end, when
    text was held back). `time_s` is on the monotonic clock. `stop_string` comes with the last event
    too: it cut the answer and is not part of it. So do `pooled`, float32, if it was asked for, and
    `drafts`, those of each drafter. `prompt_scores` come with the first token, see
    PromptScores.
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
    pooled: bytes | None = None
    drafts: tuple[DraftCount, ...] = ()
    prompt_scores: bytes | None = None


@dataclass(frozen=True, slots=True)
class Truncation:
    """What was left out of a prompt that was too long, under the user's policy for that."""

    num_turns: int
    num_tokens: int
    policy: str


@dataclass(slots=True)
class Sample:
    """One answer, finished or not."""

    text: str = ""
    thinking: str = ""
    tokens: list[TokenInfo] = field(default_factory=list)
    num_drafted_tokens: int = 0
    drafts: tuple[DraftCount, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str | None = None
    error: LocalLLMError | None = None


@dataclass(slots=True, repr=False)
class Completion:
    """The answers to one prompt, with counts of tokens and times in seconds."""

    num_prompt_tokens: int  # 0 for a server that does not report it
    started_s: float
    samples: list[Sample]
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None
    truncation: Truncation | None = None
    # A server's own count, since its events may hold several tokens each.
    num_counted_tokens: int | None = None
    is_remote: bool = False
    # What the model read (None if only a server knows it), and the part of the answer within it.
    prompt: Prompt | None = None
    said: Split = field(default_factory=Split)
    # One for each token of the prompt, if `prompt_logprobs` asked for them.
    prompt_logprobs: Sequence[TokenLogprobs | None] | None = None

    def __repr__(self) -> str:
        """The beginning of its text, and its counts."""
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
        """Why the first sample ended; None while it is unfinished."""
        return self.samples[0].finish_reason

    @property
    def stop_string(self) -> str | None:
        """The stop string that cut the first sample, if one did."""
        return self.samples[0].stop_string

    @property
    def error(self) -> LocalLLMError | None:
        """What was wrong with this prompt, if anything; other prompts are not affected."""
        return self.samples[0].error

    @property
    def num_generated_tokens(self) -> int:
        """Tokens of all samples."""
        if self.num_counted_tokens is not None:
            return self.num_counted_tokens
        return sum(len(sample.tokens) for sample in self.samples)

    @property
    def num_context_tokens(self) -> int:
        """Tokens of prompt and answers; 0 if a server does not report those of the prompt."""
        return self.num_prompt_tokens and self.num_prompt_tokens + self.num_generated_tokens

    @property
    def num_drafted_tokens(self) -> int:
        """Draft tokens of all samples."""
        return sum(sample.num_drafted_tokens for sample in self.samples)

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted draft tokens of all samples."""
        return sum(token.is_draft for sample in self.samples for token in sample.tokens)

    @property
    def drafts(self) -> list[DraftCount]:
        """The drafts of all samples that have ended, of each drafter."""
        drafted, accepted = Counter[str](), Counter[str]()
        for each in (one for sample in self.samples for one in sample.drafts):
            drafted[each.drafter] += each.num_drafted
            accepted[each.drafter] += each.num_accepted
        return [DraftCount(name, count, accepted[name]) for name, count in drafted.items()]

    @property
    def ttft_s(self) -> float:
        """Time to first token, 0 if none came."""
        return 0.0 if self.first_token_s is None else self.first_token_s - self.started_s

    @property
    def prefill_tokens_per_s(self) -> float:
        """Computed prompt tokens over the time to the first token."""
        computed = self.num_prompt_tokens - self.num_cached_tokens
        return computed / self.ttft_s if self.ttft_s else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first over the time they took; 0 if that is unknown."""
        if self.first_token_s is None or self.last_token_s is None:
            return 0.0
        took = self.last_token_s - self.first_token_s
        num_pieces = sum(len(sample.tokens) for sample in self.samples)
        if took <= 0 or (self.is_remote and took < _TOGETHER_S * (num_pieces - 1)):
            return 0.0
        return (self.num_generated_tokens - 1) / took

    def add(self, event: TextEvent) -> None:
        """Add one event."""
        if event.prompt_scores is not None:
            self.prompt_logprobs = read_scores(event.prompt_scores)
        sample = self.samples[event.sample]
        sample.text += event.text
        sample.thinking += event.thinking
        if event.token is not None:
            sample.tokens.append(event.token)
            sample.num_drafted_tokens = event.num_drafted_tokens
            self.first_token_s = self.first_token_s or event.time_s
            self.last_token_s = event.time_s
            if event.sample == 0:  # the other samples share the blocks that it computed
                self.num_cached_tokens = event.num_cached_tokens
        if event.finish_reason is not None:
            sample.finish_reason, sample.error = event.finish_reason, event.error
            sample.drafts = event.drafts
            sample.stop_string = event.stop_string
