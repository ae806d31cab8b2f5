"""What proposes tokens that may come next, and what it proposes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from torch import Tensor

    from localllm.schedule.request import Request
    from localllm.schedule.runner import Runner
    from localllm.schedule.scheduler import ScheduledBatch

NOT_KNOWN = -1


class Proposal(NamedTuple):
    """Tokens that may come next; the longer the match before them, the likelier they are.

    `match_length`: the number of tokens before the first one that matched. Tokens that are not
    known yet have the id NOT_KNOWN (see Drafter.complete). `is_ready`: else the drafter has to be
    prepared first, and there is no draft in this step.
    """

    token_ids: list[int]
    match_length: int
    is_ready: bool = True


class Drafter:
    """Proposes tokens. As it stands, it remembers no text and has nothing to prepare."""

    # Of the model that drafts, if one does.
    _runner: Runner | None = None

    def propose(self, request: Request, count: int) -> Proposal | None:
        """Up to `count` tokens to follow the request's."""
        raise NotImplementedError

    def renewed(self) -> Self:
        """A drafter of the same kind that has seen no text yet; itself, if it remembers none."""
        return self

    @property
    def is_cheap(self) -> bool:
        """Whether a look for drafts takes next to nothing, so that it may find some at any time."""
        return False

    def add(self, request: Request) -> None:
        """Note a new request."""

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""

    @property
    def has_work(self) -> bool:
        """Whether `work` has anything to do."""
        return False

    def work(self, batch: ScheduledBatch) -> None:
        """Prepare for later steps while a batch is being computed, with about as many tokens of
        work as the batch has.
        """

    def prepare(self, request: Request, *, is_trial: bool) -> None:
        """Get ready to draft for a request, as its proposal was wanted and not ready; `is_trial`:
        with little effort, only to learn how good its drafts are.
        """

    def complete(self, batch: ScheduledBatch, own: Collection[Request]) -> None:
        """Put ids into drafts that were proposed without them, now that they have blocks. `own`:
        the requests whose drafts are this drafter's.
        """

    @property
    def took_more(self) -> bool:
        """Whether `work` or `complete` did more in the newest step than they will in later ones, as
        when they catch up with a prompt. Nothing is learned from such a step's time.
        """
        return False

    @property
    def taps(self) -> Sequence[int]:
        """The hidden states that it needs, see `DecoderModel.forward_tapped`; may be empty."""
        return ()

    def see(self, batch: ScheduledBatch, hidden: Sequence[Tensor]) -> None:
        """Take the hidden states of all tokens of a batch, prompt tokens included: one tensor per
        tap, rows in token order, on the device and computed in the order of its work. A batch that
        fails is seen too, and computed again.
        """

    @property
    def is_warm(self) -> bool:
        """See Runner."""
        return self._runner is None or self._runner.is_warm

    def work_ahead(self) -> bool:
        """See Runner."""
        return self._runner is not None and self._runner.work_ahead()
