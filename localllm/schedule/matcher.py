"""Tracks an answer's position in its grammar: which tokens may come next, and which must.

A matcher lives on the host and advances only when a token has been sampled for good. Drafts are
tried on it and rolled back.

When few tokens are left, the answer is led to the end of its grammar: then exactly one token is
allowed next, given by the grammar and the number of tokens left.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from localllm.errors import RequestError
from localllm.schedule.form_ends import FormEnds

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher

# The most tokens that are drafted at once because the grammar allows no others.
MAX_FORCED = 16
# An answer is led to its end once at most _SPARE tokens more are left than the way there takes. The
# way is searched for only when _WATCHED tokens are left, or twice as many as the shortest answer
# takes, whose length is searched for up to LONGEST_WAY.
_SPARE, _WATCHED, LONGEST_WAY = 8, 64, 512


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _timed(
    method: "Callable[Concatenate[Matcher, _P], _R]",
) -> "Callable[Concatenate[Matcher, _P], _R]":
    """Add the time of each call to the cost of the next token."""

    @wraps(method)
    def call(matcher: "Matcher", /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        began_s = time.perf_counter()
        try:
            return method(matcher, *arguments, **named)
        finally:
            matcher.spent_s += time.perf_counter() - began_s

    return call


class Matcher:
    """The grammar state of one sample.

    `is_finished`: the answer is complete, and no token can follow. `cost_s`: an estimate of the
    seconds that one token takes of the step loop.
    """

    def __init__(
        self, state: "LLMatcher", ends: FormEnds | None = None, cost_s: float = 0.0
    ) -> None:
        """`ends`: finds the way to the end; None: answers are not led there. `cost_s`: of the first
        token.
        """
        self._state, self._ends = state, ends
        self.cost_s, self.spent_s = cost_s, 0.0
        self._num_left: int | None = None
        self._watched = 0
        self.is_finished = state.is_stopped() and not state.is_error()

    def copy(self) -> "Matcher":
        """An independent copy in the same state."""
        other = Matcher(self._state.deep_copy(), self._ends, self.cost_s)
        other._num_left, other._watched = self._num_left, self._watched
        return other

    def limit(self, num_tokens: int) -> None:
        """Limit the answer to `num_tokens` tokens from here on."""
        if self._ends is not None:
            shortest = self._ends.way(self._state, LONGEST_WAY)
            self._num_left = num_tokens
            self._watched = max(_WATCHED, 2 * len(shortest or ()))

    @property
    def error(self) -> RequestError | None:
        """Why the grammar cannot be followed any further; None if it can."""
        if not self._state.is_error():
            return None
        if self._state.stop_reason() == "NoExtensionBias":
            return RequestError(
                "the grammar allows no further text that the model's tokens can form",
                param="grammar",
                hint="a schema or grammar that can always be completed",
            )
        return RequestError(
            "the grammar became too complex to follow",
            param="grammar",
            where=self._state.get_error().partition("\n")[0][:200],
            hint="a simpler schema or grammar",
        )

    def advance(self, token_id: int) -> None:
        """Append `token_id`, which must be allowed, to the answer."""
        # The estimate falls slowly: the next token may cost as much as the last ones.
        self.cost_s, self.spent_s = max(self.spent_s, 0.8 * self.cost_s), 0.0
        self._state.consume_token(token_id)
        if self._num_left is not None:
            self._num_left -= 1
        if self._state.is_stopped():
            self.is_finished = not self._state.is_error()

    @_timed
    def forced(self, count: int) -> list[int]:
        """Up to `count` next tokens, as far as the grammar allows only one text; else none."""
        most = min(count, MAX_FORCED)
        way = self._way_out(0)
        if way is None or self._ends is None:
            return self._state.compute_ff_tokens()[:most]
        return self._ends.without_end(way)[:most]

    @_timed
    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids` are allowed to follow, from the first on."""
        allowed = list(token_ids)[: self._state.validate_tokens(list(token_ids))]
        if not self._is_watched(len(allowed)):
            return len(allowed)
        for count, token_id in enumerate(allowed):
            with self._behind(allowed[:count]):
                way = self._way_out(count)
            if way is not None and way[0] != token_id:
                return count
        return len(allowed)

    @_timed
    def allows(self, draft: Sequence[int], token_id: int) -> bool:
        """Whether `token_id` may follow `draft`, which must be allowed."""
        with self._behind(draft):
            # A forced text can be tokenized in several ways; only one of them is allowed.
            forced = self._way_out(len(draft)) or self._state.compute_ff_tokens()
            if forced:
                return forced[0] == token_id
            count = self._state.try_consume_tokens([token_id])
            if count:
                self._state.rollback(count)
        return count == 1

    @_timed
    def mask(self, draft: Sequence[int], vocab_size: int) -> "npt.NDArray[np.bool_] | None":
        """Which tokens may follow `draft`, which must be allowed; bool [vocab_size]. None if the
        grammar failed (see `error`).
        """
        import numpy as np  # imported late: not every program that has a matcher needs it

        with self._behind(draft):
            way = self._way_out(len(draft))
            bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        if self._state.is_error():
            return None
        if way is not None:
            led = np.zeros(vocab_size, dtype=np.bool_)
            led[way[0]] = True
            return led
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)

    @_timed
    def fill(self, draft: Sequence[int], masks: "npt.NDArray[np.int32]") -> None:
        """Write masks of the tokens that may follow the first 0, 1, … tokens of `draft`.

        `masks`: int32 [1 + len(draft), vocab / 32], a bit for each token, all zero. After a draft
        token that is not allowed all bits are set, since those rows are not read.
        """
        moved = 0
        for row, token_id in zip(masks, (*draft, None), strict=True):
            way = self._way_out(moved)
            if way is None:
                self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            else:
                word, bit = divmod(way[0], 32)
                row.view("uint32")[word] = 1 << bit
            if token_id is None or self._state.try_consume_tokens([token_id]) == 0:
                masks[moved + 1 :] = -1
                break
            moved += 1
        if moved:
            self._state.rollback(moved)

    def _is_watched(self, num_behind: int) -> bool:
        return self._num_left is not None and self._num_left - num_behind <= self._watched

    def _way_out(self, num_behind: int) -> list[int] | None:
        """The way to the end if it has to be taken now; None if all tokens that the grammar allows
        may follow. `num_behind`: the number of drafted tokens in the current state.
        """
        if self._ends is None or self._num_left is None or not self._is_watched(num_behind):
            return None
        left = self._num_left - num_behind
        way = self._ends.way(self._state, left)
        return way if way and left <= len(way) + _SPARE else None

    @contextmanager
    def _behind(self, draft: Sequence[int]) -> Iterator[None]:
        """Within the block, the state is the one after `draft`."""
        if draft:
            self._state.consume_tokens(list(draft))
        try:
            yield
        finally:
            if draft:
                self._state.rollback(len(draft))
