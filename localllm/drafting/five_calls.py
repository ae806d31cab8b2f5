"""The older policy (speculation.py) behind the five calls of speculator.py, until it is deleted."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from localllm.drafting.draft_lengths import DraftLengths
from localllm.drafting.speculation import Proposer as OldProposer
from localllm.drafting.speculation import Speculator as OldSpeculator
from localllm.drafting.speculator import PlannedStep, Proposer, Speculator, StepOutcome
from localllm.schedule.request import DraftCount, Request
from localllm.schedule.scheduler import ScheduledBatch
from localllm.schedule.step_times import StepTimes

if TYPE_CHECKING:
    from torch import Tensor

# Depths of a head's drafts whose acceptances are told apart.
_HEAD_DEPTHS = 4


def with_older_policy(
    proposers: Sequence[Proposer], max_draft: int, max_match: int, budget: int
) -> "FiveCalls":
    """A speculator whose drafts the older policy chooses; `max_match`: see SpeculationConfig;
    `budget`: see FiveCalls.
    """
    plain, own = StepTimes(), list[OldProposer]()
    for name, drafter in proposers:
        depths = 1 if name == "draft model" else _HEAD_DEPTHS
        lengths = DraftLengths(depths, plain, has_matches=False)
        if drafter.is_cheap:
            lengths = DraftLengths(max_match + 1, plain)
        own.append(OldProposer(name, drafter, lengths))
    return FiveCalls(OldSpeculator(own, max_draft), budget)


class FiveCalls:
    """One; see Speculator for its calls."""

    def __init__(self, speculator: OldSpeculator, budget: int) -> None:
        """`budget`: the most tokens of a step."""
        self.speculator, self._budget = speculator, budget
        self._known = set[Request]()
        self._has_waited = False
        # Of the newest step: whether drafts took no longer than they will, and whether there was a
        # look for them.
        self._newest: PlannedStep | None = None

    @property
    def proposers(self) -> Sequence[Proposer]:
        """Who drafts."""
        return [Proposer(each.name, each.drafter) for each in self.speculator._proposers]

    @property
    def taps(self) -> list[int]:
        """See Speculator."""
        return self.speculator.taps

    @property
    def is_warm(self) -> bool:
        """See Speculator."""
        return self.speculator.is_warm

    def work_ahead(self) -> bool:
        """See Speculator."""
        return self.speculator.work_ahead()

    def renewed(self) -> "FiveCalls":
        """See Speculator."""
        return FiveCalls(self.speculator.renewed(), self._budget)

    def parts(self) -> dict[str, "FiveCalls"]:
        """See Speculator."""
        parts = self.speculator.parts()
        return {name: FiveCalls(part, self._budget) for name, part in parts.items()}

    def plan(
        self, running: Sequence[Request], *, is_ahead: bool = False
    ) -> Mapping[Request, Sequence[int]] | None:
        """See Speculator."""
        if is_ahead and self.speculator.wants_ids():
            self._has_waited = True
            return None
        return self.speculator.propose(running, self._budget)

    def fill(self, batch: ScheduledBatch) -> PlannedStep | None:
        """See Speculator."""
        for entry in batch.requests:
            if entry.request not in self._known:
                self._known.add(entry.request)
                self.speculator.add(entry.request)
        has_waited, self._has_waited, self._newest = self._has_waited, False, None
        if self.speculator.is_watching:
            self.speculator.complete(batch)
            looks = {0: 0.0} if self.speculator.is_looking else {}
            self._newest = PlannedStep(0, looks=looks, has_waited=has_waited)
        return self._newest

    def beside(self, batch: ScheduledBatch, hidden: "Sequence[Tensor]") -> None:
        """See Speculator."""
        self.speculator.see(batch, hidden)
        if self._newest is not None:
            self.speculator.work(batch)
            self._newest.is_usual = not self.speculator.took_more

    def learn(self, outcome: StepOutcome) -> None:
        """See Speculator."""
        if outcome.planned is not None:
            self.speculator.learn(
                outcome.batch,
                outcome.sampled,
                outcome.seconds,
                outcome.planned.has_waited,
                is_usual=outcome.planned.is_usual,
                has_looked=bool(outcome.planned.looks),
            )

    def forget(self, request: Request) -> tuple[DraftCount, ...]:
        """See Speculator."""
        counts = self.speculator.counts(request)
        self.speculator.forget(request)
        self._known.discard(request)
        return counts


AnySpeculator = FiveCalls | Speculator
