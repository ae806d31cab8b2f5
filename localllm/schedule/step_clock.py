"""Measures what steps take on this machine while it runs, and lets one experiment at a time.

A plain step decodes some requests, without drafts and prompts. Plain steps are slow at first in a
cold process, and behind steps with drafts: caches hold what the others needed, and the processor's
clock is that of another kind of work. With `pocket` on two threads of one core the first one takes
1.6 times as long as it would if nobody had drafted, the fifth 1.3 times, the tenth 1.1 times. So
they count once they have settled.

Who tries another number of threads, another length of a prompt's part or other drafts changes what
steps take. So one experiments at a time, and meanwhile the others learn nothing.
"""

from localllm.schedule.step_model import SETTLE_STEPS, StepModel

# Plain steps have settled when the fastest of SETTLE_STEPS takes at least SETTLED of the time of
# the fastest of as many before.
SETTLED = 0.98


class StepClock:
    """What steps take.

    `since`: of the plain steps since the last one of another kind, until they have settled, the
    seconds for each request.
    """

    def __init__(self, num_drafters: int = 0) -> None:
        self.model = StepModel(num_drafters)
        self._experimenter: object | None = None
        self.since, self.is_settled = list[float](), False

    @property
    def plain_seconds(self) -> float | None:
        """Of a plain step; None if nothing was measured."""
        return self.model.plain_seconds if self.model.is_measured else None

    def add_plain(self, size: int, seconds: float) -> bool:
        """Record a plain step of so many requests; returns whether it has shown that they have
        settled.
        """
        if self.is_settled:
            self.model.add_plain(size, seconds, is_settled=True)
            return False
        self.since.append(seconds / size)
        last, before = self.since[-SETTLE_STEPS:], self.since[-2 * SETTLE_STEPS : -SETTLE_STEPS]
        self.is_settled = len(before) == SETTLE_STEPS and min(last) >= SETTLED * min(before)
        if self.is_settled:
            seconds = min(last) * size
        self.model.add_plain(size, seconds, is_settled=self.is_settled)
        return self.is_settled

    def unsettle(self) -> None:
        """Note a step of another kind: the plain ones behind it are slow at first."""
        self.is_settled, self.since = False, []

    def begin_experiment(self, who: object) -> bool:
        """Whether it may change what steps take until `end_experiment`: nobody else does."""
        if self._experimenter is None:
            self._experimenter = who
        return self._experimenter is who

    def end_experiment(self, who: object) -> None:
        """Let others experiment, if this one did."""
        if self._experimenter is who:
            self._experimenter = None

    def is_disturbed(self, who: object) -> bool:
        """Whether somebody else experiments."""
        return self._experimenter not in (None, who)
