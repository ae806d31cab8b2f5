"""Drafts for several requests, one token of all of them after the other."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from localllm.schedule.request import Request
from localllm.schedule.runner import HeadRunner, Launched
from localllm.schedule.scheduler import ScheduledBatch, ScheduledRequest


@dataclass(frozen=True, slots=True)
class Drafting:
    """`num_drafts` tokens to draft for the batch's request `index`, behind `end` tokens.

    `text`: the drafter's copy of the request, to which its drafts are appended; `num_skipped`,
    `num_seen`: see ScheduledRequest.
    """

    index: int
    text: Request
    num_drafts: int
    end: int
    num_skipped: int = 0
    num_seen: int | None = None

    def entry(self, start: int, end: int) -> ScheduledRequest:
        """Tokens from `start` to `end`, after which a token is sampled."""
        return ScheduledRequest(
            self.text,
            start,
            end - start,
            catches_up=True,
            num_skipped=self.num_skipped,
            num_seen=self.num_seen,
        )

    def take(self) -> list[int]:
        """The drafted tokens, which its copy of the request then lacks."""
        drafted = self.text.token_ids[self.end :]
        del self.text.token_ids[self.end :]
        return drafted


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A step that samples a token for each of some texts."""

    launched: Launched
    texts: Sequence[Request]

    def take(self) -> None:
        """Wait for the tokens and append them; a row that is not finite gives token 0."""
        for text, [token] in zip(self.texts, self.launched.wait(), strict=True):
            text.append(token.token_id or 0)


def draft_on(
    runner: HeadRunner,
    drafting: Sequence[Drafting],
    rows: Tensor,
    first: Sequence[UnderWay] = (),
) -> list[list[int]]:
    """The drafts of all, those with more of them first.

    `rows`: what stands before each one's next token, [drafts, hidden]; `first`: the steps that
    sample their first tokens, if these are computed already.
    """
    has_grammar = any(each.text.matcher for each in drafting)
    # A device that overlaps keeps the newest tokens, so one step may be in flight.
    most_under_way = 0 if has_grammar or not runner.overlaps else 1
    under_way = deque(first)
    try:
        for depth in range(1 if first else 0, drafting[0].num_drafts):
            while len(under_way) > most_under_way:
                under_way.popleft().take()
            going_on = [each for each in drafting if each.num_drafts > depth]
            entries = [each.entry(each.end + depth - 1, each.end + depth) for each in going_on]
            launched = runner.launch(ScheduledBatch(entries), rows[: len(going_on)])
            under_way.append(UnderWay(launched, [each.text for each in going_on]))
            [rows] = launched.hidden
        for step in under_way:
            step.take()
    finally:
        # After a failure, too, so that the next draft goes on from the request's own tokens.
        drafts = [each.take() for each in drafting]
    return drafts
