"""What one drafter has gained and lost, in tokens of each request, and what it may still lose."""

from typing import NamedTuple

from localllm.drafting.acceptance import Acceptance

# What an account begins with; the most it holds; what all get a step, and again for looks that lead
# to nothing; and how many plain steps a wait or a look is charged at most, since other work may
# make one slow.
ACCOUNT_START, ACCOUNT_MOST, TRICKLE, MOST_CHARGED = 5.0, 12.0, 0.005, 2.0


class Owed(NamedTuple):
    """A step with drafts that is not booked yet: the tokens of each request, the drafted ones among
    them, and how many tokens would have been made in the time of a plain step otherwise.
    """

    tokens: float
    length: float
    rate: float


class DraftAccount:
    """Of one drafter, with what is known of its drafts.

    `is_cheap`: what it proposes depends on the text, and to ask it takes next to nothing;
    `balance`: tokens of each request, and `needs`: what a trial takes; `is_used`: its last drafts
    were worth it, and `gain`: what they promised; `trial_left`: the steps that are left of its
    trial.
    """

    def __init__(self, is_cheap: bool, trickle: float = TRICKLE) -> None:
        """`trickle`: what it gets a step."""
        self._trickle, self.is_cheap, self.is_used, self.trial_left = trickle, is_cheap, False, 0
        self.balance, self.needs = ACCOUNT_START, ACCOUNT_START / 2
        self.gain = 1.0
        self.acceptance = Acceptance()
        self._owed = list[Owed]()
        self._vain = 0.0  # what there is for looks that lead to nothing

    def pass_steps(self, count: int) -> None:
        """Note that so many steps begin."""
        self._book(self._trickle * count)
        self._vain = min(ACCOUNT_START, self._vain + self._trickle / 2 * count)

    def book(self, drafted: Owed, line: tuple[float, float] | None) -> None:
        """Book a step with drafts, once it is known what they cost: the first ones are slow, and
        other work may make one slow. `line`: see StepModel; None if it is not known.
        """
        self._owed.append(drafted)
        if line is not None:
            fixed, marginal = line
            for tokens, length, rate in self._owed:
                self._book(tokens - rate * (1 + fixed + marginal * length))
            self._owed.clear()

    def charge_look(self, tokens: float) -> None:
        """Take a look for drafts out of it; one that leads to nothing out of what there is for
        these, unless the drafter has gained enough.
        """
        if self._is_paid:
            self._book(-tokens)
        else:
            self._vain -= tokens

    @property
    def _is_paid(self) -> bool:
        return self.is_used or not self.is_cheap or self.balance > ACCOUNT_START

    def _book(self, tokens: float) -> None:
        # Never overdrawn: so it is tried again after a while, whatever a slow spell has cost.
        self.balance = min(ACCOUNT_MOST, max(0.0, self.balance + tokens))

    def refill(self) -> None:
        """Begin anew, since what was lost was lost under other conditions."""
        self.balance = max(self.balance, ACCOUNT_START)

    @property
    def steps_to_ask(self) -> int:
        """How many steps it will not be asked, if nothing happens; 0: it is asked now."""
        if self.is_used or self.trial_left or (self.is_cheap and self._is_paid):
            return 0
        lacking = -2 * self._vain if self.is_cheap else self.needs - self.balance
        return int(lacking / self._trickle) + 1 if lacking > 0 else 0
