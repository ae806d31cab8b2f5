"""Where an answer stands in its grammar: which tokens may come next, and which must.

A matcher is kept on the host and moves on when a token is booked, never before. What a draft would
lead to is looked at and taken back.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from localllm.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from llguidance import LLMatcher

# Of tokens that a grammar leaves no choice about, so many are drafted at once.
MAX_FORCED = 16


class Matcher:
    """The state of one sample. `is_finished`: the answer is complete, and nothing can be added."""

    def __init__(self, state: "LLMatcher") -> None:
        self._state = state
        self.is_finished = state.is_stopped() and not state.is_error()

    def copy(self) -> "Matcher":
        """Another one in the same state."""
        return Matcher(self._state.deep_copy())

    @property
    def error(self) -> RequestError | None:
        """Why the grammar cannot be followed any further, if so."""
        if not self._state.is_error():
            return None
        return RequestError(
            "the grammar became too complex to be followed",
            param="grammar",
            where=self._state.get_error().partition("\n")[0][:200],
            hint="a simpler schema or grammar",
        )

    def advance(self, token_id: int) -> None:
        """The answer goes on with `token_id`, which is one that is allowed."""
        self._state.consume_token(token_id)
        if self._state.is_stopped():
            self.is_finished = not self._state.is_error()

    def forced(self, count: int) -> list[int]:
        """The next tokens, up to `count`, of the only text that is allowed, if there is one."""
        return self._state.compute_ff_tokens()[: min(count, MAX_FORCED)]

    def count_allowed(self, token_ids: Sequence[int]) -> int:
        """How many of `token_ids` can follow, from the first on."""
        return self._state.validate_tokens(list(token_ids))

    def allows(self, draft: Sequence[int], token_id: int) -> bool:
        """Whether `token_id` may come behind `draft`, which is allowed."""
        with self._behind(draft):
            forced = self._state.compute_ff_tokens()
            if forced:  # of the ways to write a text that is forced one is allowed
                return forced[0] == token_id
            count = self._state.try_consume_tokens([token_id])
            if count:
                self._state.rollback(count)
        return count == 1

    def mask(self, draft: Sequence[int], vocab_size: int) -> "npt.NDArray[np.bool_] | None":
        """Which tokens may come behind `draft`, which is allowed; None where that cannot be said
        any more (see `error`).
        """
        import numpy as np  # not for a program that only asks

        with self._behind(draft):
            bits = np.frombuffer(self._state.compute_bitmask(), dtype=np.uint8)
        if self._state.is_error():
            return None
        return np.unpackbits(bits, count=vocab_size, bitorder="little").view(np.bool_)

    def fill(self, draft: Sequence[int], masks: "npt.NDArray[np.int32]") -> None:
        """Write the tokens that may come behind 0, 1, … tokens of `draft` into as many rows.

        `masks`: int32 [1 + len(draft), vocab / 32], a bit for each token, all zero. Behind a draft
        that is not allowed everything is: nobody reads on there.
        """
        moved = 0
        for row, token_id in zip(masks, (*draft, None), strict=True):
            self._state.unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
            if token_id is None or self._state.try_consume_tokens([token_id]) == 0:
                masks[moved + 1 :] = -1
                break
            moved += 1
        if moved:
            self._state.rollback(moved)

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
