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
    """What steps take, by how many requests decode.

    `since`: the plain steps since the last one of another kind, until they have settled.
    """

    def __init__(self, num_drafters: int = 0) -> None:
        self._num_drafters = num_drafters
        self._experimenter: object | None = None
        self._models: dict[int, StepModel] = {}
        self._size, self.since, self.is_settled = 0, list[float](), False

    def model(self, size: int) -> StepModel:
        """For so many requests; a new one begins like that of the nearest size."""
        if size not in self._models:
            nearest = min(self._models, key=lambda each: abs(each - size), default=size)
            self._models[size] = StepModel(self._num_drafters, self._models.get(nearest))
        return self._models[size]

    def plain_seconds(self, size: int) -> float | None:
        """None if nothing was measured."""
        model = self.model(size)
        return model.plain_seconds if model.is_measured else None

    def add_plain(self, size: int, seconds: float) -> bool:
        """Record a plain step; returns whether it has shown that they have settled."""
        model = self.model(size)
        if self.is_settled:
            model.add_plain(seconds, is_settled=True)
            return False
        if size != self._size:
            self._size, self.since = size, []
        self.since.append(seconds)
        if not model.is_measured:
            model.add_plain(seconds, is_settled=False)
        last, before = self.since[-SETTLE_STEPS:], self.since[-2 * SETTLE_STEPS : -SETTLE_STEPS]
        if len(before) < SETTLE_STEPS or min(last) < SETTLED * min(before):
            return False
        model.add_plain(min(last), is_settled=True)
        self.is_settled = True
        return True

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
