"""How likely tokens are: those of an answer one by one, those of a prompt in a form that is small
enough to be sent.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position, from the model's distribution before any filter."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(slots=True)
class PromptScores:
    """For each token of a prompt but the first, its log-probability, and the `num_top` likeliest
    tokens in its place with theirs.
    """

    logprobs: "array[float]"
    top_ids: "array[int]"
    top_logprobs: "array[float]"
    num_top: int

    @classmethod
    def of(cls, num_prompt: int, num_top: int) -> "PromptScores":
        """Scores of a prompt of `num_prompt` tokens that are still to be found."""
        count = num_prompt - 1
        top = bytes(4 * count * num_top)
        return cls(array("f", bytes(4 * count)), array("i", top), array("f", top), num_top)

    def put(
        self,
        position: int,
        logprobs: Sequence[float],
        top_ids: Sequence[int],
        top_logprobs: Sequence[float],
    ) -> None:
        """Book what the tokens from `position` on say of those that follow them."""
        start, end = position * self.num_top, (position + len(logprobs)) * self.num_top
        self.logprobs[position : position + len(logprobs)] = array("f", logprobs)
        self.top_ids[start:end] = array("i", top_ids)
        self.top_logprobs[start:end] = array("f", top_logprobs)

    def pack(self) -> bytes:
        """All of it, for `read_scores`."""
        parts = (array("i", [self.num_top]), self.logprobs, self.top_ids, self.top_logprobs)
        return b"".join(part.tobytes() for part in parts)


def read_scores(packed: bytes) -> list[TokenLogprobs | None]:
    """One for each token of the prompt; the first has nothing before it."""
    num_top = array("i", packed[:4])[0]
    count = (len(packed) - 4) // (4 + 8 * num_top)
    logprobs, top_ids, top_logprobs = array("f"), array("i"), array("f")
    place = 4
    for part, size in ((logprobs, 1), (top_ids, num_top), (top_logprobs, num_top)):
        part.frombytes(packed[place : place + 4 * count * size])
        place += 4 * count * size
    found: list[TokenLogprobs | None] = [None]
    for i, logprob in enumerate(logprobs):
        own = slice(i * num_top, (i + 1) * num_top)
        top = tuple(zip(top_ids[own], top_logprobs[own], strict=True))
        found.append(TokenLogprobs(logprob, top))
    return found
