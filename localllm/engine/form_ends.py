"""The way from a place in a grammar to its end, for an answer whose tokens run short.

A model that is at a loss goes on for ever within a form: another key, another item, a longer text.
Where little is left of its tokens it is led out: a string closes, then the object around it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

# What closes comes before what goes on; the first that the grammar admits is taken. Where both
# brackets are, it is within a string, which its quote ends.
QUOTE, BRACKETS = '"', ("}", "]")
CLOSING = (*BRACKETS, QUOTE, ",", ":", ")", ";", ">", ".", "0", "1", "n", "t", "f", "-", "[", "{")
# After everything else: space that may go on is a long way.
SPACE = ("\n", " ")

# Where nothing of CLOSING fits, a step needs the mask of the whole vocabulary; so many at most.
MAX_GUESSES = 16


class FormEnds:
    """Short ways to the end, token by token: of JSON, and of what closes like it.

    They are not always the shortest; where only some word ends a pattern there may be none.
    """

    def __init__(
        self, id_of: Callable[[str], int | None], ends: Sequence[int], first: Sequence[int] = ()
    ) -> None:
        """`id_of`: of a single character, None where it is no token; `ends`: the model's end
        tokens; `first`: the tokens of a text that is tried before anything else.
        """
        self._ends = tuple(ends)
        found = [id_of(char) for char in (*CLOSING, *SPACE)]
        self._first = list(first)
        self._closing = tuple(each for each in found if each is not None)
        self._quote, self._brackets = id_of(QUOTE), [id_of(char) for char in BRACKETS]

    def way(self, state: "LLMatcher", most: int) -> list[int] | None:
        """The tokens that end the answer from `state` on, which is as it was afterwards; None where
        `most` do not.
        """
        tokens: list[int] = []
        num_guesses = 0
        try:
            while not state.is_stopped():
                if len(tokens) >= most:
                    return None
                found = self._next(state)
                if not found and num_guesses < MAX_GUESSES:
                    found = _first_allowed(state.compute_bitmask())
                    num_guesses += 1
                if not found:
                    return None
                if found[0] in self._ends:
                    tokens += found
                    break
                # A long text that is forced takes as long to find for each of its tokens.
                count = state.try_consume_tokens(found)
                tokens += found[:count]
                if count == 0:
                    return None
        finally:
            num_consumed = len(self.without_end(tokens))
            if num_consumed:
                state.rollback(num_consumed)
        return tokens if len(tokens) <= most else None

    def without_end(self, way: Sequence[int]) -> list[int]:
        """A way without the model's end token, where that is its last."""
        return [token_id for token_id in way if token_id not in self._ends]

    def _next(self, state: "LLMatcher") -> list[int]:
        """The end, all that is forced, or the first of CLOSING that fits; empty where none does."""
        if state.is_accepting():
            return [end for end in self._ends if state.validate_tokens([end])][:1]
        forced: list[int] = state.compute_ff_tokens()
        if forced:
            return forced
        if self._first and state.validate_tokens(self._first) == len(self._first):
            return self._first
        within = [self._quote, *self._brackets]
        fits = [each for each in within if each is not None and state.validate_tokens([each])]
        if len(fits) == len(within):
            return fits[:1]
        for token_id in self._closing:
            if state.validate_tokens([token_id]):
                return [token_id]
        return []


def _first_allowed(bits: bytes) -> list[int]:
    """The lowest id that a mask admits: in the vocabularies of the field, a single character."""
    for place, byte in enumerate(bits):
        if byte:
            return [8 * place + (byte & -byte).bit_length() - 1]
    return []
