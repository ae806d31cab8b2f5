"""The blocks of one cache group: how many a request needs, and which it can free.

A **full** group keeps the keys and values of all tokens. A **window** group needs only those of the
last `window` tokens: older blocks go back to the pool, and the null block replaces them in the
request's table, where no query reads any more. An **aligned** window begins at the last multiple
of itself: a query there needs nothing before it.
"""

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from localllm.schedule.block_pool import NULL_BLOCK_ID, BlockPool


def most_blocks(
    window: int | None,
    block_size: int,
    num_tokens: int,
    chunk: int,
    *,
    is_aligned: bool = False,
) -> int:
    """The most blocks of a group that a request of `num_tokens` tokens holds at once.

    The request is computed in steps of at most `chunk` tokens. `window`: the group's; None: full;
    `is_aligned`: see BlockGroup.
    """
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    if is_aligned:
        # The window may hold all but its last token already, and starts in the middle of a block
        # only where blocks do not divide it.
        return min(whole, -(-(window - 1 + chunk) // block_size) + (window % block_size > 0))
    # The window and the chunk need not start at a block boundary.
    return min(whole, -(-(window + chunk) // block_size) + 1)


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """A pool of blocks of `block_size` tokens.

    `window`: how many tokens a query attends to, itself included; None: all. `is_aligned`: only to
    those from the last multiple of it on.
    """

    pool: BlockPool
    block_size: int
    window: int | None = None
    is_aligned: bool = False

    def blocks_of(self, num_tokens: int) -> int:
        """The number of blocks for `num_tokens` tokens; the last one may be partly filled."""
        return -(-num_tokens // self.block_size)

    def first_needed(self, position: int) -> int:
        """The index of the first block that queries at `position` or later read."""
        if self.window is None:
            return 0
        if self.is_aligned:
            return position // self.window * self.window // self.block_size
        return max(0, position - self.window + 1) // self.block_size

    def most_held(self, num_tokens: int, chunk: int) -> int:
        """See `most_blocks`."""
        return most_blocks(
            self.window, self.block_size, num_tokens, chunk, is_aligned=self.is_aligned
        )

    def longest_request(self, chunk: int) -> int | None:
        """The longest request, in tokens, that the pool can hold; None: any length."""
        held = self.pool.num_usable_blocks
        if self.window is not None and held >= self.most_held(sys.maxsize, chunk):
            return None
        return held * self.block_size

    def give_back(self, table: "array[int]", position: int) -> None:
        """Free the blocks that no query at `position` or later reads."""
        place = self.first_needed(position) - 1
        # Everything before a null block has already been freed.
        while place >= 0 and table[place] != NULL_BLOCK_ID:
            self.pool.free([table[place]])
            table[place] = NULL_BLOCK_ID
            place -= 1

    def fits(self, table: "array[int]", start: int, count: int) -> bool:
        """Whether the pool has blocks for `count` tokens from position `start`."""
        num_new = self.blocks_of(start + count) - len(table)
        return num_new + self._is_copied(table, start) <= self.pool.num_free_blocks

    def reserve(self, table: "array[int]", start: int, count: int) -> tuple[int, int] | None:
        """Allocate blocks for `count` tokens from position `start`; they must fit (see `fits`).

        If the first block to be written is shared, or can be found by its key, a new block replaces
        it. Returns the copy that the caller must then make, as (source, target).
        """
        copied = None
        if self._is_copied(table, start):
            shared = table[start // self.block_size]
            [own] = self.pool.allocate(1)
            self.pool.free([shared])
            table[start // self.block_size] = own
            copied = shared, own
        num_new = self.blocks_of(start + count) - len(table)
        table.extend(self.pool.allocate(max(0, num_new)))
        return copied

    def _is_copied(self, table: "array[int]", start: int) -> bool:
        first = start // self.block_size
        return first < len(table) and self.pool.is_shared(table[first])

    def roll_back(self, table: "array[int]", num_tokens: int) -> None:
        """Free the blocks after the first `num_tokens` tokens, after a rejected draft or a failed
        step. The rest of the last block that is kept will be overwritten.
        """
        num_blocks = self.blocks_of(num_tokens)
        self.pool.free(reversed(table[num_blocks:]))
        del table[num_blocks:]

    def num_held(self, block_ids: Sequence[int]) -> int:
        """The number of blocks in a table, null blocks left out."""
        return sum(block_id != NULL_BLOCK_ID for block_id in block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Free all blocks of a table, last one first."""
        self.pool.free(block_id for block_id in reversed(block_ids) if block_id != NULL_BLOCK_ID)

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one user to each block of a table."""
        self.pool.share(block_id for block_id in block_ids if block_id != NULL_BLOCK_ID)
