"""A request: its prompt and parameters, its tokens, and how far they are computed."""

from array import array
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import NamedTuple

from localllm.errors import RequestError
from localllm.schedule.logprobs import PromptScores, TokenLogprobs
from localllm.schedule.matcher import Matcher
from localllm.schedule.sampling_params import SamplingParams


class RequestStatus(Enum):
    """The state of a request in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class DraftCount:
    """How many tokens somebody drafted for an answer, and how many were accepted."""

    drafter: str
    num_drafted: int
    num_accepted: int


class TokenEvent(NamedTuple):
    """The result of one step for one sample of a request: a token, an end, or both.

    `is_draft`: whether the token was drafted and accepted. `num_cached_tokens` counts the prompt
    tokens whose keys and values were found in the cache, `num_drafted_tokens` all tokens drafted
    for this sample so far. `pooled`: what `pooling` asked for, float32; `drafts`: with the last
    event, those of each drafter; `prompt_scores`: with the first token, if they were asked for, see
    PromptScores.
    """

    request_id: int
    sample: int
    token_id: int | None
    finish_reason: FinishReason | None = None
    logprobs: TokenLogprobs | None = None
    error: RequestError | None = None
    num_cached_tokens: int = 0
    is_draft: bool = False
    num_drafted_tokens: int = 0
    pooled: bytes | None = None
    drafts: tuple[DraftCount, ...] = ()
    prompt_scores: bytes | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One sample of a request; `token_ids` holds the prompt and then what was generated.

    Tokens before `num_computed_tokens` have their keys and values in the blocks of `tables`. Up to
    `num_pending` more tokens are being sampled, and their ids are still on the device: one, and
    those of a draft that is being verified. `parent` is sample 0 of the same request, whose prompt
    blocks a sample shares once they are computed. Requests with different `salt`s share nothing.
    `matcher` tracks the generated tokens in the grammar, if there is one. `scores`: of the prompt,
    until they are handed over, if they were asked for; each of its tokens is then computed.
    """

    request_id: int
    sample: int
    num_prompt_tokens: int
    token_ids: list[int]
    params: SamplingParams
    seed: int
    stop_token_ids: frozenset[int]
    max_total_tokens: int
    parent: "Request | None" = None
    salt: bytes = b""
    matcher: Matcher | None = None
    scores: PromptScores | None = None
    status: RequestStatus = RequestStatus.WAITING
    # Whether the host needs the request's ids to prepare its next step.
    needs_ids: bool = False
    num_pending: int = 0
    # Steps that are scheduled and not booked yet.
    steps_under_way: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    num_preemptions: int = 0
    # The request's index among the running requests, and the number of the admission that assigned
    # it, counted over all requests.
    slot: int = -1
    admission: int = 0
    # The most tokens in a step, after memory ran out with more.
    max_chunk: int | None = None
    # For each cache group, the blocks that hold the request's tokens.
    tables: "list[array[int]]" = field(default_factory=list)
    # Content keys of the full blocks of `token_ids`, as far as they were needed; and how many
    # blocks are registered in the prefix cache.
    block_keys: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    # The position before which the states of recurrences have seen all tokens.
    state_position: int = 0
    # Where messages of the prompt end, and where it was seen to part from another request; and the
    # key of the newest snapshot that rolls, see snapshots.py.
    borders: frozenset[int] = frozenset()
    # Tokens of the prompt to keep in the cache for longer than others.
    num_to_keep: int = 0
    rolling_key: bytes | None = None

    @property
    def num_tokens(self) -> int:
        """The number of prompt and generated tokens, including those whose ids are pending."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_generated_tokens(self) -> int:
        """The number of tokens after the prompt whose ids are on the host."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def waits_for_ids(self) -> bool:
        """Whether the next step cannot be prepared before the pending ids are known."""
        if self.num_pending == 0:
            return False
        return self.needs_ids or self.num_pending > 1 or self.num_tokens >= self.max_total_tokens

    def append(self, token_id: int) -> None:
        """Append `token_id` to the answer."""
        self.token_ids.append(token_id)
        if self.matcher is not None:
            self.matcher.advance(token_id)

    def finish_reason_after(self, token_id: int) -> FinishReason | None:
        """Why the request ends after `token_id`, its newest token; None if it does not.

        A request whose grammar is complete does not end with LENGTH.
        """
        if token_id in self.stop_token_ids:
            return FinishReason.STOP
        if self.matcher is not None and self.matcher.is_finished:
            return None
        if len(self.token_ids) >= self.max_total_tokens:
            return FinishReason.LENGTH
        return None
