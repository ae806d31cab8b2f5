"""Whose grammars a step follows, where those of all would hold up everybody's next token.

A mask of an ordinary grammar takes well under a millisecond, one of an involved grammar tens of
them. What such requests take of a step is bounded: they take turns, and the others go on.
"""

from collections.abc import Collection, Sequence

from localllm.engine.request import Request

# What grammars may take of a step together, unless one alone takes more; and what counts.
BUDGET_S, _SLOW_S = 0.05, 0.001


class GrammarTurns:
    """Who has waited longest comes first."""

    def __init__(self, budget_s: float = BUDGET_S) -> None:
        self._budget_s = budget_s
        self._step = 0
        self._served: dict[Request, int] = {}

    def resting(self, running: Sequence[Request]) -> Collection[Request]:
        """Those of the running requests that the next step leaves out."""
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
