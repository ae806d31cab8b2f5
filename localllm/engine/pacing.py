"""How much of a prompt is read in a step while others wait for their next token.

A step in which somebody's next token is computed, and a part of a prompt besides, takes longer than
one without. Prompts get as much time as the tokens take: so the time per token of who is answered
at most doubles, on the average, however long the prompt is, and a prompt is read in the other half.
What a part costs is measured while it is read; where even the smallest is too much for a step, it
waits for several.
"""

# The smallest part of a prompt; products of fewer rows cost nearly as much.
MIN_PART = 16
# Of the time that tokens take; less than all, since measures come late.
_SHARE = 0.7
# How much of an average is the newest value.
_NEWEST = 0.2
# What a step without prompts takes is measured again after so many with them; it changes with the
# number of those who are answered.
_MEASURED_EVERY = 32


class Pacer:
    """Books steps, and says how many tokens of prompts the next one may read."""

    def __init__(self) -> None:
        self._plain_s: float | None = None
        self._token_s: float | None = None
        # Time that prompts may take and have not taken yet.
        self._credit_s = 0.0
        self._num_mixed = 0

    def part(self, most: int) -> int:
        """Tokens of prompts that the next step may read, besides the next token of somebody; at
        most `most`.
        """
        if self._plain_s is None or self._num_mixed >= _MEASURED_EVERY:
            return 0  # how long a step takes without them is measured first
        if self._token_s is None:
            return min(MIN_PART, most)
        if self._credit_s >= most * self._token_s:
            return most
        allowed = int(self._credit_s / self._token_s)
        return allowed if allowed >= MIN_PART else 0

    def book(self, num_prompt_tokens: int, seconds: float) -> None:
        """A step that computed somebody's next token, and so many tokens of prompts, took so long.

        What is learned from few steps may be wrong by a lot: neither credit nor debt is kept for
        longer than two steps, or the smallest part.
        """
        if num_prompt_tokens == 0:
            self._num_mixed = 0
            self._plain_s = _mean(self._plain_s, seconds)
            self._credit_s += _SHARE * self._plain_s
        else:
            self._num_mixed += 1
            plain = self._plain_s or 0.0
            taken = max(0.0, seconds - plain)
            # No token of a prompt costs more than one of an answer: kernels were compiled, say.
            self._token_s = _mean(self._token_s, min(taken / num_prompt_tokens, plain))
            self._credit_s += _SHARE * plain - taken
        smallest = MIN_PART * (self._token_s or 0.0)
        most = max(2 * _SHARE * (self._plain_s or 0.0), smallest)
        self._credit_s = min(max(self._credit_s, -most), most)

    def rest(self) -> None:
        """Nobody waits for a next token now: what was owed is nobody's any more."""
        self._credit_s = max(self._credit_s, 0.0)


def _mean(known: float | None, newest: float) -> float:
    return newest if known is None else known + _NEWEST * (newest - known)
