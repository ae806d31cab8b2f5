"""Which tokens' entries stand in the cache of a model that drafts.

The cache has the block ids of a full group of the target's cache, so prefixes, shared blocks,
copies and preemption work as without it. Of each slot, the token whose entry is there is known:
where a block was reused for another text, the tokens differ, and the entry is computed again.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.request import Request
from localllm.schedule.rows import slots_of
from localllm.schedule.scheduler import BlockCopy, ScheduledBatch

NOTHING = -1
# Numpy takes longer than a loop for fewer tokens.
_FEW = 16


class OwnEntries:
    """The tokens of all slots; `table`: the index of the requests' table that the cache follows."""

    def __init__(self, kv_cache: PagedKVCache, table: int) -> None:
        self.block_size, self._table = kv_cache.block_size, table
        self._kv_cache = kv_cache
        self._tokens = np.full(kv_cache.num_blocks(0) * self.block_size, NOTHING, np.int32)

    @property
    def has_states(self) -> bool:
        """Whether there are states of recurrences beside the entries."""
        return bool(self._kv_cache.recurrent)

    def blocks(self, text: Request) -> Sequence[int]:
        """The blocks of a text."""
        return text.tables[self._table]

    def num_slots(self, text: Request) -> int:
        """How many tokens of a text have a slot."""
        return len(text.tables[self._table]) * self.block_size

    def write(self, text: Request, start: int, token_ids: Sequence[int]) -> None:
        """Record that the entries of these tokens stand in the slots from `start` on."""
        table, size = text.tables[self._table], self.block_size
        if len(token_ids) < _FEW:
            for position, token in enumerate(token_ids, start):
                self._tokens[table[position // size] * size + position % size] = token
        else:
            self._tokens[self._slots(text, start, start + len(token_ids))] = token_ids

    def differing(self, text: Request, start: int, end: int) -> npt.NDArray[np.int64]:
        """The positions from `start` up to `end` whose slots hold no entry of the text's token."""
        own = self._tokens[self._slots(text, start, end)]
        found: npt.NDArray[np.int64] = np.flatnonzero(own != text.token_ids[start:end]) + start
        return found

    def copy(self, batch: ScheduledBatch) -> list[BlockCopy]:
        """Make the batch's copies of blocks; returns those of the table that the cache follows."""
        copies = [copy for copy in batch.block_copies if copy.group == self._table]
        if copies:
            self._kv_cache.copy_blocks([self._table] * len(self._kv_cache.stacks), copies)
            by_block = self._tokens.reshape(-1, self.block_size)
            for copy in copies:
                by_block[copy.target] = by_block[copy.source]
        return copies

    def _slots(self, text: Request, start: int, end: int) -> npt.NDArray[np.int64]:
        table = np.array(text.tables[self._table], np.int32)
        return slots_of(np.arange(start, end), table, self.block_size)
