"""What computes scheduled batches, as the engine and drafters see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from localllm.schedule.sampling_params import SamplingParams
    from localllm.schedule.scheduler import SampledToken, ScheduledBatch, ScheduledRequest


class Launched(Protocol):
    """A batch that is being computed."""

    def wait(self) -> list[list[SampledToken]]:
        """Wait for the tokens of the caught-up requests and return them, in order: for each, the
        accepted part of its draft and one more token.
        """

    @property
    def hidden(self) -> tuple[Tensor, ...]:
        """For each of the runner's taps, the hidden states of the batch's tokens, [num_tokens,
        hidden]; behind these, of a batch that `scores_prompts`, those after the last norm. They are
        on the device, computed in the order of its work, and valid until the next batch is
        launched.
        """


class Runner(Protocol):
    """Runs batches for the engine.

    `overlaps`: whether batches are computed while Python goes on, so that the next one should be
    scheduled before the tokens of the last are known; batches are computed in order.
    """

    @property
    def overlaps(self) -> bool:
        """See the class."""

    def needs_ids(self, params: SamplingParams) -> bool:
        """Whether the host needs the ids of a request's tokens to prepare its next step."""

    def launch(self, batch: ScheduledBatch) -> Launched:
        """Start to compute a batch and to sample its caught-up requests."""

    @property
    def is_warm(self) -> bool:
        """Whether everything that can be prepared for steps is ready, so that none waits for it."""

    def work_ahead(self) -> bool:
        """Do a small piece of work that saves time later; False if there is nothing to do."""

    def release_memory(self) -> None:
        """Release memory that is held but not needed."""


class HeadDraft(NamedTuple):
    """A head's new tokens of a request, and how many to draft behind them."""

    entry: ScheduledRequest
    num_drafts: int


class HeadRunner(Runner, Protocol):
    """Runs batches of a head, which reads hidden states of another model besides tokens."""

    def draft(self, drafts: Sequence[HeadDraft], hidden: Tensor) -> list[list[int]] | None:
        """The drafts of some requests, those with more of them first, all at once; None where that
        is not possible. They take no notice of filters and penalties. Where no drafts are asked
        for, the entries of the new tokens are made. `hidden`: as for `launch`, of all new tokens.
        """

    def launch(self, batch: ScheduledBatch, hidden: Tensor | None = None) -> Launched:
        """See Runner. `hidden`: those before the batch's tokens, [num_tokens, hidden]."""


class Computed(NamedTuple):
    """A batch that is already computed."""

    sampled: list[list[SampledToken]]
    hidden: tuple[Tensor, ...] = ()

    def wait(self) -> list[list[SampledToken]]:
        """See Launched."""
        return self.sampled
