"""How likely a drafter's tokens are accepted, from what became of earlier ones.

The class of a token is the number k of tokens before it that matched or were drafted: so many
successes in a row. Where nothing else is known, the next one is as likely as the one before it, or
as Laplace's rule of succession says, (k + 1) / (k + 2), if that is more; and a request is like all.
With each step with drafts every count loses weight: a length that is never drafted is forgotten,
and so drafted again.
"""

from collections.abc import Sequence
from typing import NamedTuple

from localllm.schedule.request import Request

# A guess is worth so many outcomes, and an outcome keeps so much of its weight in a step.
GUESS_WEIGHT, KEPT = 4.0, 0.99
# Classes from this one on are alike.
_LAST_CLASS = 63


class Draft(NamedTuple):
    """What became of a request's draft."""

    request: Request
    match_length: int
    num_drafted: int
    num_accepted: int


class _Counts:
    """Decided and accepted tokens of each class; `age`: the steps that they have lost weight in."""

    __slots__ = ("accepted", "age", "decided")

    def __init__(self) -> None:
        self.decided: dict[int, float] = {}
        self.accepted: dict[int, float] = {}
        self.age = 0

    def fade(self, age: int) -> None:
        """Let them lose weight up to an age."""
        factor = KEPT ** (age - self.age)
        self.age = age
        if factor < 1:
            for each in (self.decided, self.accepted):
                for kind in each:
                    each[kind] *= factor

    def add(self, kind: int, *, is_accepted: bool) -> None:
        self.decided[kind] = self.decided.get(kind, 0.0) + 1
        self.accepted[kind] = self.accepted.get(kind, 0.0) + is_accepted

    def chance(self, kind: int, guess: float) -> float:
        decided, accepted = self.decided.get(kind, 0.0), self.accepted.get(kind, 0.0)
        return (accepted + GUESS_WEIGHT * guess) / (decided + GUESS_WEIGHT)


class Acceptance:
    """The chances of one drafter's tokens, of each request and of all."""

    def __init__(self) -> None:
        self._all, self._own, self._age = _Counts(), dict[Request, _Counts](), 0

    def add(self, drafts: Sequence[Draft]) -> None:
        """Count the outcomes of a step's drafts, up to the first token that was not accepted."""
        self._age += 1
        self._all.fade(self._age)
        for draft in drafts:
            own = self._own.setdefault(draft.request, _Counts())
            own.fade(self._age)
            for i in range(min(draft.num_accepted + 1, draft.num_drafted)):
                kind = min(draft.match_length + i, _LAST_CLASS)
                for counts in (self._all, own):
                    counts.add(kind, is_accepted=i < draft.num_accepted)

    def chances(
        self,
        request: Request,
        match_length: int,
        count: int,
        least: float = 0.0,
        *,
        is_sure: bool = False,
    ) -> list[float]:
        """That the first token, the first two, … of a draft are accepted; up to the first of them
        that is less likely than `least`, without it but for the first token. `is_sure`: only as
        likely as their outcomes alone show.
        """
        own, found, chance, product = self._own.get(request), list[float](), 0.0, 1.0
        for kind in range(match_length, match_length + count):
            kind = min(kind, _LAST_CLASS)
            guess = 0.0 if is_sure else max(chance, (kind + 1) / (kind + 2))
            chance = self._all.chance(kind, guess)
            product *= chance if own is None else own.chance(kind, chance)
            if product < least and found:
                break
            found.append(product)
        return found

    def forget(self, request: Request) -> None:
        """Drop a request that has ended."""
        self._own.pop(request, None)
