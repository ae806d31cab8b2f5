"""How much of a prompt is read in a step while others wait for their next token.

A step in which somebody's next token is computed, and a part of a prompt besides, takes longer than
one without. Prompts get as much time as the tokens take: so the time per token of who is answered
at most doubles, on the average, however long the prompt is, and a prompt is read in the other half.

What a part costs is measured while prompts are read: a fixed cost of the step, and a cost for each
token. On a GPU the fixed cost is high, since a step with a part of a prompt is launched kernel by
kernel, where one without is a captured graph. There a large part now and then reads a prompt
many times sooner than a small one in every step.
"""

from math import inf

# The smallest part of a prompt; products of fewer rows cost nearly as much. More than _CAPTURED.
MIN_PART = 24
# Steps with so few tokens a request are captured graphs on a GPU, and say nothing of larger ones.
_CAPTURED = 16
# Of the time that tokens take; less than all, since measures come late.
_SHARE = 0.7
# How much of an average is the newest value.
_NEWEST = 0.2
# What a step without prompts takes is measured again after so many with them; it changes with the
# number of those who are answered.
_MEASURED_EVERY = 32
# The fixed cost is at most this share of what a part costs, as far as a step may last.
_FIXED_SHARE = 0.1
# A part is at most so many times as large as the largest that was measured.
_GROWTH = 4
# Seconds that a part may take where a step without one is much shorter.
_LONGEST_PART_S = 0.1


class PartCost:
    """Seconds that a part of a prompt adds to a step: a fixed cost, and one for each token.

    A line through the parts that were measured, old ones counting less; those that may have been
    captured graphs do not count. `is_split`: sizes differed enough to tell both costs apart.
    """

    def __init__(self) -> None:
        self.fixed_s = self.token_s = 0.0
        self.largest = 0
        self.is_split = False
        # Weights, and the weighted sums of tokens, seconds, tokens², tokens · seconds.
        self._sums = [0.0] * 5

    def add(self, num_tokens: int, seconds: float) -> None:
        """A part of so many tokens took so long."""
        if num_tokens <= _CAPTURED:
            return
        self.largest = max(self.largest, num_tokens)
        new = (1.0, num_tokens, seconds, num_tokens**2, num_tokens * seconds)
        self._sums = [(1 - _NEWEST) * old + each for old, each in zip(self._sums, new, strict=True)]
        weight, tokens, times, squares, products = self._sums
        mean, mean_s = tokens / weight, times / weight
        variance = squares / weight - mean**2
        if variance > (0.3 * mean) ** 2:
            self.is_split = True
            slope = (products / weight - mean * mean_s) / variance
            self.fixed_s = mean_s - mean * min(max(slope, 0.0), mean_s / mean)
        self.fixed_s = min(self.fixed_s, mean_s)
        self.token_s = (mean_s - self.fixed_s) / mean

    def seconds(self, num_tokens: int) -> float:
        """What a part of so many tokens costs."""
        return self.fixed_s + num_tokens * self.token_s

    def tokens(self, seconds: float) -> float:
        """The largest part that costs no more."""
        if self.token_s == 0.0:
            return inf
        return max(0.0, (seconds - self.fixed_s) / self.token_s)


class Pacer:
    """Books steps, and says how many tokens of prompts the next one may read."""

    def __init__(self) -> None:
        self._plain_s: float | None = None
        self._cost = PartCost()
        # Time that prompts may take and have not taken yet; below zero: took in advance.
        self._credit_s = 0.0
        self._num_mixed = 0

    def part(self, most: int) -> int:
        """Tokens of prompts that the next step may read, besides the next token of somebody; at
        most `most`.
        """
        if self._plain_s is None or self._num_mixed >= _MEASURED_EVERY:
            return 0  # how long a step takes without them is measured first
        if self._credit_s < 0.0:
            return 0
        cost = self._cost
        if not cost.largest:
            return min(MIN_PART, most)
        step_s = _SHARE * self._plain_s
        longest = cost.tokens(max(_LONGEST_PART_S, 2 * step_s))
        # What every step can have, or as much as makes the fixed cost small.
        wanted = max(cost.tokens(step_s), cost.tokens(cost.fixed_s / _FIXED_SHARE))
        if not cost.is_split and 2 * cost.largest <= longest:
            wanted = max(wanted, 2 * cost.largest)
        wanted = min(wanted, longest, _GROWTH * cost.largest)
        return min(max(MIN_PART, int(wanted)), most)

    def book(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step that computed somebody's next token, and so many tokens of prompts, took so long.

        What is learned from few steps may be wrong by a lot: neither credit nor debt is kept for
        longer than two steps, or than the longest part.
        """
        if num_prompt_tokens == 0:
            self._num_mixed = 0
            self._plain_s = _mean(self._plain_s, seconds)
            self._credit_s += _SHARE * self._plain_s
        else:
            self._num_mixed += 1
            plain = self._plain_s or 0.0
            taken = max(0.0, seconds - plain)
            self._credit_s += _SHARE * plain - taken
            # No token of a prompt costs more than one of an answer: kernels were compiled, say.
            self._cost.add(num_prompt_tokens, min(taken, plain * num_prompt_tokens))
        two_steps = 2 * _SHARE * (self._plain_s or 0.0)
        smallest = self._cost.seconds(MIN_PART)
        longest = max(_LONGEST_PART_S, two_steps, smallest)
        self._credit_s = min(max(self._credit_s, -longest), two_steps)

    def rest(self) -> None:
        """Nobody waits for a next token now: what was owed is nobody's any more."""
        self._credit_s = max(self._credit_s, 0.0)


def _mean(known: float | None, newest: float) -> float:
    return newest if known is None else known + _NEWEST * (newest - known)
