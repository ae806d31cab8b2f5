"""Finds a short way to the end of a grammar, for an answer that has few tokens left.

A model that is stuck can continue inside a structure forever: another key, another item, a longer
string. When few tokens are left, the answer is led to its end: first the string is closed, then the
object around it.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

# Closing characters come before those that continue; the first that the grammar allows is taken. If
# the quote and both brackets are allowed, the place is inside a string, which the quote ends.
QUOTE, BRACKETS = '"', ("}", "]")
CLOSING = (*BRACKETS, QUOTE, ",", ":", ")", ";", ">", ".", "0", "1", "n", "t", "f", "-", "[", "{")
# Tried last: whitespace that may repeat leads to no short end.
SPACE = ("\n", " ")

# If no character fits, a step needs the mask of the whole vocabulary; at most this many such steps.
MAX_GUESSES = 16


class FormEnds:
    """Finds short ways to the end, token by token, for JSON and formats that close like it.

    They are not always the shortest; if only a certain word ends a pattern, none may be found.
    """

    def __init__(
        self, id_of: Callable[[str], int | None], ends: Sequence[int], first: Sequence[int] = ()
    ) -> None:
        """`id_of`: gives the token id of a single character, None if it is not a token; `ends`: the
        model's end tokens; `first`: the tokens of a text that is tried before anything else.
        """
        self._ends = tuple(ends)
        found = [id_of(char) for char in (*CLOSING, *SPACE)]
        self._first = list(first)
        self._closing = tuple(each for each in found if each is not None)
        self._quote, self._brackets = id_of(QUOTE), [id_of(char) for char in BRACKETS]

    def way(self, state: "LLMatcher", most: int) -> list[int] | None:
        """The tokens that end the answer from `state` on; None if no way of at most `most` tokens
        is found. `state` is restored afterwards.
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
                # All at once: finding a long forced text again for each of its tokens is slow.
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
        """A way without the model's end token."""
        return [token_id for token_id in way if token_id not in self._ends]

    def _next(self, state: "LLMatcher") -> list[int]:
        """An end token, all forced tokens, `first`, or the first character that fits, in this
        order; empty if nothing fits.
        """
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
    """The lowest id that a mask allows: in common vocabularies, a single character."""
    for place, byte in enumerate(bits):
        if byte:
            return [8 * place + (byte & -byte).bit_length() - 1]
    return []
