"""Limits how much prefill a step may contain while other requests are decoding.

A step that decodes, and prefills a part of a prompt besides, takes longer than one that only
decodes. Prefill gets at most as much time as decoding: so on average the time per token of decoding
requests at most doubles, however long a prompt is, and prefill gets the other half of the time.

The cost of a part is measured while prompts are computed: a fixed cost of the step, and a cost for
each token. On a GPU the fixed cost is high, since a step with a part of a prompt is launched kernel
by kernel, while one without is a captured graph. There, a large part now and then finishes a prompt
many times sooner than a small part in every step.
"""

from math import inf

from localllm.schedule.step_clock import StepClock

# The smallest part of a prompt; products of fewer rows cost nearly as much. More than _CAPTURED.
MIN_PART = 24
# Steps with at most this many tokens per request are captured graphs on a GPU, and their times say
# nothing about larger ones.
_CAPTURED = 16
# Prefill time as a share of decode time; less than 1, since measurements come late.
_SHARE = 0.7
# Weight of the newest value in a moving average.
_NEWEST = 0.2
# The time of a step without prefill is measured again after this many steps with prefill; it
# changes with the number of decoding requests.
_MEASURED_EVERY = 32
# Parts are made so large that the fixed cost is at most this share of a part's cost, if the limit
# on a part's time allows it.
_FIXED_SHARE = 0.1
# A part is at most this many times as large as the largest that was measured.
_GROWTH = 4
# The seconds that a part may take even if a step without one is much shorter.
_LONGEST_PART_S = 0.1


class PartCost:
    """Seconds that a part of a prompt adds to a step: a fixed cost, and a cost per token.

    Both come from a line fitted to the measured parts, in which older ones weigh less; parts small
    enough to be captured graphs are left out. `is_split`: the sizes differed enough to tell the two
    costs apart.
    """

    def __init__(self) -> None:
        self.fixed_s = self.token_s = 0.0
        self.largest = 0
        self.is_split = False
        # Weights, and the weighted sums of tokens, seconds, tokens², tokens · seconds.
        self._sums = [0.0] * 5

    def add(self, num_tokens: int, seconds: float) -> None:
        """Record that a part of `num_tokens` tokens took `seconds`."""
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
        """The estimated seconds of a part of `num_tokens` tokens."""
        return self.fixed_s + num_tokens * self.token_s

    def tokens(self, seconds: float) -> float:
        """The largest part, in tokens, that takes at most `seconds`."""
        if self.token_s == 0.0:
            return inf
        return max(0.0, (seconds - self.fixed_s) / self.token_s)


class Pacer:
    """Records the times of steps, and decides how many prompt tokens the next one may contain."""

    def __init__(self, clock: StepClock | None = None) -> None:
        """`clock`: says whether what steps take is of others' making."""
        self._clock = clock or StepClock()
        self._plain_s: float | None = None
        self._cost = PartCost()
        # Seconds that prefill may take and has not taken yet; below zero: taken in advance.
        self._credit_s = 0.0
        self._num_mixed = 0

    def part(self, most: int) -> int:
        """The number of prompt tokens that the next step, which also decodes, may contain; at most
        `most`.
        """
        if self._plain_s is None or self._num_mixed >= _MEASURED_EVERY:
            return 0  # a step without prefill must be measured first
        if self._credit_s < 0.0:
            return 0
        cost = self._cost
        if not cost.largest:
            return min(MIN_PART, most)
        step_s = _SHARE * self._plain_s
        longest = cost.tokens(max(_LONGEST_PART_S, 2 * step_s))
        # As much as fits into every step, or enough to make the fixed cost small.
        wanted = max(cost.tokens(step_s), cost.tokens(cost.fixed_s / _FIXED_SHARE))
        if not cost.is_split and 2 * cost.largest <= longest:
            wanted = max(wanted, 2 * cost.largest)
        wanted = min(wanted, longest, _GROWTH * cost.largest)
        return min(max(MIN_PART, int(wanted)), most)

    def book(self, num_prompt_tokens: int, seconds: float) -> None:
        """Record that a step with decoding requests and `num_prompt_tokens` took `seconds`.

        Nothing is learned while others experiment. Estimates from few steps may be far off, so
        credit is limited to the share of two steps, and debt to that or the time of the longest
        part.
        """
        learns = not self._clock.is_disturbed(self)
        if num_prompt_tokens == 0:
            self._num_mixed = 0
            if learns or self._plain_s is None:
                self._plain_s = _mean(self._plain_s, seconds)
            self._credit_s += _SHARE * self._plain_s
        else:
            self._num_mixed += 1
            plain = self._plain_s or 0.0
            taken = max(0.0, seconds - plain)
            self._credit_s += _SHARE * plain - taken
            # A prompt token never costs more than a decode step; if it seems to, kernels were
            # compiled, for example.
            if learns:
                self._cost.add(num_prompt_tokens, min(taken, plain * num_prompt_tokens))
        two_steps = 2 * _SHARE * (self._plain_s or 0.0)
        smallest = self._cost.seconds(MIN_PART)
        longest = max(_LONGEST_PART_S, two_steps, smallest)
        self._credit_s = min(max(self._credit_s, -longest), two_steps)

    def rest(self) -> None:
        """No request is decoding now, so debt is cancelled."""
        self._credit_s = max(self._credit_s, 0.0)


def _mean(known: float | None, newest: float) -> float:
    return newest if known is None else known + _NEWEST * (newest - known)
