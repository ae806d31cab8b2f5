"""Chooses which requests with slow grammars a step includes, so that they do not delay all others.

The mask of an ordinary grammar takes well under a millisecond, that of a complex grammar tens of
milliseconds. The time of slow grammars in a step is limited: their requests take turns, and all
other requests are in every step.
"""

from collections.abc import Collection, Sequence

from localllm.schedule.request import Request

# The most time that slow grammars may take of a step together, unless one alone takes more; and the
# time per token above which a grammar counts as slow.
BUDGET_S, _SLOW_S = 0.05, 0.001


class GrammarTurns:
    """Requests with slow grammars take turns; the one that has waited longest comes first."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._step = 0
        self._served: dict[Request, int] = {}

    def resting(self, running: Sequence[Request]) -> Collection[Request]:
        """The running requests that the next step leaves out."""
        costs = {
            request: request.matcher.cost_s
            for request in running
            if request.matcher is not None and request.matcher.cost_s > _SLOW_S
        }
        if not costs and not self._served:
            return ()
        self._step += 1
        self._served = {request: self._served.get(request, 0) for request in costs}
        left_s, resting = self._budget_s, list[Request]()
        for place, request in enumerate(sorted(costs, key=self._served.__getitem__)):
            if place and costs[request] > left_s:
                resting.append(request)
            else:
                self._served[request] = self._step
                left_s -= costs[request]
        return resting
