"""The blocks of one cache group: what a request needs there, and what it may give back.

A **full** group keeps keys and values of all tokens. A **window** group needs those of the last
`window` tokens only: blocks behind them go back to the pool, and the null block stands in their
place in the request's table, where no query looks any more.
"""

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from localllm.engine.block_pool import NULL_BLOCK_ID, BlockPool


def most_blocks(window: int | None, block_size: int, num_tokens: int, chunk: int) -> int:
    """The most blocks that a request of so many tokens holds at once in a group with such a window,
    computed in steps of at most `chunk` tokens.
    """
    whole = -(-num_tokens // block_size)
    if window is None:
        return whole
    # The window and the chunk need not begin where a block does.
    return min(whole, -(-(window + chunk) // block_size) + 1)


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """A pool of blocks of `block_size` tokens; `window`: tokens that a query may look back on,
    itself included, None: all.
    """

    pool: BlockPool
    block_size: int
    window: int | None = None

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that so many tokens fill, the last of them perhaps in part."""
        return -(-num_tokens // self.block_size)

    def first_needed(self, position: int) -> int:
        """The place of the first block that a query at `position`, or behind it, looks at."""
        if self.window is None:
            return 0
        return max(0, position - self.window + 1) // self.block_size

    def most_held(self, num_tokens: int, chunk: int) -> int:
        """See `most_blocks`."""
        return most_blocks(self.window, self.block_size, num_tokens, chunk)

    def longest_request(self, chunk: int) -> int | None:
        """Tokens of the longest request that the pool can hold; None: any length."""
        held = self.pool.num_usable_blocks
        if self.window is not None and held >= self.blocks_of(self.window + chunk) + 1:
            return None
        return held * self.block_size

    def give_back(self, table: "array[int]", position: int) -> None:
        """Free what no query at `position`, or behind it, looks at."""
        place = self.first_needed(position) - 1
        # What lies before a null block was given back before.
        while place >= 0 and table[place] != NULL_BLOCK_ID:
            self.pool.free([table[place]])
            table[place] = NULL_BLOCK_ID
            place -= 1

    def fits(self, table: "array[int]", start: int, count: int) -> bool:
        """Whether there are blocks for the `count` tokens from `start` on."""
        num_new = self.blocks_of(start + count) - len(table)
        return num_new + self._is_copied(table, start) <= self.pool.num_free_blocks

    def reserve(self, table: "array[int]", start: int, count: int) -> tuple[int, int] | None:
        """Own blocks for them, which have to fit. Where others have the block that is written
        first, or may find it, its content is to be copied: (from, to).
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
        """Free the blocks behind so many tokens: of a draft that was not accepted, or of a step
        that failed. What stands in the last block behind them is written over.
        """
        num_blocks = self.blocks_of(num_tokens)
        self.pool.free(reversed(table[num_blocks:]))
        del table[num_blocks:]

    def num_held(self, block_ids: Sequence[int]) -> int:
        """The blocks of a table that are not the null block."""
        return sum(block_id != NULL_BLOCK_ID for block_id in block_ids)

    def release(self, block_ids: Sequence[int]) -> None:
        """Free all blocks of a table, the last one first."""
        self.pool.free(block_id for block_id in reversed(block_ids) if block_id != NULL_BLOCK_ID)

    def share(self, block_ids: Iterable[int]) -> None:
        """Count one more user of each block of a table."""
        self.pool.share(block_id for block_id in block_ids if block_id != NULL_BLOCK_ID)
