"""Where an answer stands in its grammar: which tokens may come next, and which must.

A matcher is kept on the host and moves on when a token is booked, never before. What a draft would
lead to is looked at and taken back.

Where the tokens of an answer run short it is led to the end of its form: then one token may come
next, as the grammar and the number of tokens that are left say, and nothing else.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from localllm.engine.form_ends import FormEnds
from localllm.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher

# Of tokens that a grammar leaves no choice about, so many are drafted at once.
MAX_FORCED = 16
# An answer is led to its end where so many tokens more are left than the way there takes; and
# nobody looks for that way before so many are left, or twice as many as the shortest answer takes.
_SPARE, _WATCHED, LONGEST_WAY = 8, 64, 512


_P = ParamSpec("_P")
_R = TypeVar("_R")


def _timed(
    method: "Callable[Concatenate[Matcher, _P], _R]",
) -> "Callable[Concatenate[Matcher, _P], _R]":
    """What a call takes counts to the cost of the next token."""

    @wraps(method)
    def call(matcher: "Matcher", /, *arguments: _P.args, **named: _P.kwargs) -> _R:
        began_s = time.perf_counter()
        try:
            return method(matcher, *arguments, **named)
        finally:
            matcher.spent_s += time.perf_counter() - began_s

    return call


class Matcher:
    """The state of one sample. `is_finished`: the answer is complete, and nothing can be added.

    `cost_s`: seconds that a token takes of who computes steps, as far as that is known.
    """

    def __init__(
        self, state: "LLMatcher", ends: FormEnds | None = None, cost_s: float = 0.0
    ) -> None:
        """`ends`: leads to the end; None: nobody does. `cost_s`: of the first token."""
        self._state, self._ends = state, ends
        self.cost_s, self.spent_s = cost_s, 0.0
        self._num_left: int | None = None
        self._watched = 0
        self.is_finished = state.is_stopped() and not state.is_error()

    def copy(self) -> "Matcher":
        """Another one in the same state."""
        other = Matcher(self._state.deep_copy(), self._ends, self.cost_s)
        other._num_left, other._watched = self._num_left, self._watched
        return other

    def limit(self, num_tokens: int) -> None:
        """The answer has at most so many tokens from here on."""
        if self._ends is not None:
            shortest = self._ends.way(self._state, LONGEST_WAY)
            self._num_left = num_tokens
            self._watched = max(_WATCHED, 2 * len(shortest or ()))

    @property
    def error(self) -> RequestError | None:
        """Why the grammar cannot be followed any further, if so."""
        if not self._state.is_error():
            return None
        if self._state.stop_reason() == "NoExtensionBias":
            return RequestError(
                "no text that the model can write goes on within the grammar",
                param="grammar",
                hint="a schema or grammar that leaves a way to its end",
            )
        return RequestError(
            "the grammar became too complex to be followed",
            param="grammar",
            where=self._state.get_error().partition("\n")[0][:200],
            hint="a simpler schema or grammar",
        )

    def advance(self, token_id: int) -> None:
        """The answer goes on with `token_id`, which is one that is allowed."""
        # Slowly down: the next place may be as costly as the last ones.
        self.cost_s, self.spent_s = max(self.spent_s, 0.8 * self.cost_s), 0.0
        self._state.consume_token(token_id)
        if self._num_left is not None:
            self._num_left -= 1
        if self._state.is_stopped():
            self.is_finished = not self._state.is_error()

    @_timed
    def forced(self, count: int) -> list[int]:
        """The next tokens, up to `count`, of the only text that is allowed, if there is one."""
        most = min(count, MAX_FORCED)
        way = self._way_out(0)
        if way is None or self._ends is None:
            return self._state.compute_ff_tokens()[:most]
        return self._ends.without_end(way)[:most]

    @_timed
    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids` can follow, from the first on."""
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
        """Whether `token_id` may come behind `draft`, which is allowed."""
        with self._behind(draft):
            # Of the ways to write a text that is forced one is allowed.
            forced = self._way_out(len(draft)) or self._state.compute_ff_tokens()
            if forced:
                return forced[0] == token_id
            count = self._state.try_consume_tokens([token_id])
            if count:
                self._state.rollback(count)
        return count == 1

    @_timed
    def mask(self, draft: Sequence[int], vocab_size: int) -> "npt.NDArray[np.bool_] | None":
        """Which tokens may come behind `draft`, which is allowed; None where that cannot be said
        any more (see `error`).
        """
        import numpy as np  # not for a program that only asks

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
        """Write the tokens that may come behind 0, 1, … tokens of `draft` into as many rows.

        `masks`: int32 [1 + len(draft), vocab / 32], a bit for each token, all zero. Behind a draft
        that is not allowed everything is: nobody reads on there.
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
        """The way to the end where it has to be taken, from the state behind so many drafted
        tokens; None where anything may be said that the grammar admits.
        """
        if self._ends is None or self._num_left is None or not self._is_watched(num_behind):
            return None
        left = self._num_left - num_behind
        way = self._ends.way(self._state, left)
        return way if way and left <= len(way) + _SPARE else None

    @contextmanager
    def _behind(self, draft: Sequence[int]) -> Iterator[None]:
        """The state behind `draft`, for a while."""
        if draft:
            self._state.consume_tokens(list(draft))
        try:
            yield
        finally:
            if draft:
                self._state.rollback(len(draft))
