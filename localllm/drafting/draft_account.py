"""What one drafter has gained and lost, in tokens of each request, and what it may still lose."""

from localllm.drafting.acceptance import Acceptance
from localllm.drafting.draft_cost import DraftCost

# What an account begins with, which is also what a trial needs; the most it holds; what it gets a
# step; and how many times what it was thought to take a step is charged at most, since other work
# may make one slow.
ACCOUNT_START, ACCOUNT_MOST, TRICKLE, MOST_CHARGED = 5.0, 12.0, 0.005, 2.0


class DraftAccount:
    """Of one drafter, with what is known of its drafts.

    `is_cheap`: what it proposes depends on the text, and to ask it takes next to nothing;
    `balance`: tokens of each request, and `level`: what a trial needs; `is_used`: its last drafts
    were worth it, and `gain`: what they promised; `trial_left`: the steps that are left of its
    trial.
    """

    def __init__(self, is_cheap: bool) -> None:
        self.is_cheap, self.is_used, self.trial_left = is_cheap, False, 0
        self.balance = self.level = ACCOUNT_START
        self.gain = 1.0
        self.acceptance = Acceptance()
        self._costs: dict[int, DraftCost] = {}

    def book(self, tokens: float) -> None:
        """Put tokens into it, or take them out."""
        self.balance = min(ACCOUNT_MOST, self.balance + tokens)

    def refill(self) -> None:
        """Begin anew, since what was lost was lost under other conditions."""
        self.balance = max(self.balance, ACCOUNT_START)
        self.level = ACCOUNT_START

    def give_up(self) -> None:
        """Draft no more, until half of what was lost has trickled; the other half is paid by what
        it had, as far as a trial leaves half of ACCOUNT_START.
        """
        self.is_used = False
        least, most = ACCOUNT_START / 2, ACCOUNT_START
        self.level = min(max((self.level + self.balance) / 2, least), most)

    @property
    def steps_to_ask(self) -> int:
        """How many steps it will not be asked, if nothing happens; 0: it is asked now."""
        if self.is_used or self.trial_left:
            return 0 if self.balance > 0 else self._steps_to(0.0)
        return self._steps_to(0.0 if self.is_cheap else self.level)

    def _steps_to(self, balance: float) -> int:
        return 0 if self.balance >= balance else int((balance - self.balance) / TRICKLE) + 1

    def cost(self, size: int) -> DraftCost:
        """At a batch size; at first like that of the nearest one."""
        if size not in self._costs:
            nearest = min(self._costs, key=lambda each: abs(each - size), default=None)
            self._costs[size] = DraftCost(None if nearest is None else self._costs[nearest])
        return self._costs[size]

    def rescale(self, change: float) -> None:
        """Book again what was compared with old plain steps; see DraftCost."""
        wrong = sum(cost.rescale(change) for cost in self._costs.values())
        self.balance = min(ACCOUNT_MOST, self.balance + wrong)
