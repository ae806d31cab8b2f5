"""Token ids in, token events out: the step loop over scheduler, runner and sampler."""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from localllm.config import SamplingParams, brief
from localllm.engine.request import FinishReason, Request, TokenEvent
from localllm.engine.runner import ModelRunner
from localllm.engine.sampler import sample_seed, sample_tokens
from localllm.engine.scheduler import Scheduler
from localllm.errors import ContextLengthError, RequestError


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What requests are held against."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]


class Engine:
    """Runs any number of requests at once; the caller drives it with `step`.

    Not thread-safe: one thread calls it.
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, limits: EngineLimits) -> None:
        self.limits = limits
        self.scheduler = scheduler
        self._runner = runner
        self._next_request_id = 0

    @property
    def context_length(self) -> int:
        """The longest request, prompt and answer together."""
        return min(self.limits.max_model_len, self.scheduler.max_request_tokens)

    def add_request(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> int:
        """Queue a request of `params.n` samples; returns its id, which its events carry.

        The answer is clipped to the room left in the context.

        Raises: RequestError for token ids out of range; ContextLengthError for a prompt that
        leaves no room for a single new token. Other requests are not touched.
        """
        self._check(prompt_token_ids, params)
        num_prompt = len(prompt_token_ids)
        room = self.context_length - num_prompt
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        stop_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids |= self.limits.eos_token_ids
        seed = secrets.randbits(63) if params.seed is None else params.seed
        request_id = self._next_request_id
        self._next_request_id += 1
        first: Request | None = None
        for sample in range(params.n):
            request = Request(
                request_id=request_id,
                sample=sample,
                num_prompt_tokens=num_prompt,
                token_ids=list(prompt_token_ids),
                params=params,
                seed=sample_seed(seed, sample),
                stop_token_ids=stop_ids,
                max_total_tokens=num_prompt + max_tokens,
                parent=first,
            )
            first = first or request
            self.scheduler.add(request)
        return request_id

    def has_unfinished(self) -> bool:
        """Whether `step` has work."""
        return self.scheduler.has_unfinished()

    def step(self) -> list[TokenEvent]:
        """Compute one batch and sample the requests that caught up."""
        batch = self.scheduler.schedule()
        if not batch.requests:
            return []
        try:
            logits = self._runner.forward(batch)
            caught_up = [entry.request for entry in batch.requests if entry.catches_up]
            sampled = sample_tokens(logits, caught_up, self._runner.ops) if caught_up else []
        except BaseException:
            # Nobody knows what was written; whoever steps on recomputes these requests.
            self.scheduler.roll_back(batch)
            raise
        return self.scheduler.update(batch, sampled)

    def abort(self, request_id: int, sample: int | None = None) -> list[TokenEvent]:
        """End a request, or one sample of it, now; its blocks are free at once.

        Returns the last events of the samples that were not finished.
        """
        return [
            TokenEvent(request_id, request.sample, None, FinishReason.ABORT)
            for request in self.scheduler.abort(request_id, sample)
        ]

    def _check(self, prompt: Sequence[int], params: SamplingParams) -> None:
        vocab_size = self.limits.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty", param="prompt", hint="give it some text")
        for name, ids in (
            ("prompt", prompt),
            ("logit_bias", params.logit_bias),
            ("stop_token_ids", params.stop_token_ids),
        ):
            for token_id in ids:
                if type(token_id) is not int or not 0 <= token_id < vocab_size:
                    raise RequestError(
                        f"{name}: token id {brief(token_id)} is not one of the model's "
                        f"0 to {vocab_size - 1}",
                        param=name,
                    )
        limit = self.context_length
        if len(prompt) >= limit:
            held_by_cache = limit < self.limits.max_model_len
            raise ContextLengthError(
                f"the prompt has {len(prompt):,} tokens, the context {limit:,} "
                f"(one of them for the answer)",
                param="prompt",
                where="the KV cache holds no more than that" if held_by_cache else "",
                hint="a larger KV cache"
                if held_by_cache
                else "a shorter prompt, or a larger --ctx",
            )
