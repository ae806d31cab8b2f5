"""Finds blocks that already hold the beginning of a request, in memory or in a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import NULL_BLOCK_ID, hash_block
from localllm.schedule.request import Request, RequestStatus
from localllm.schedule.snapshots import Snapshots

if TYPE_CHECKING:
    from torch import Tensor

# The most blocks to fetch from the store in a step while other requests are running.
_FETCHED_AT_ONCE = 32


class PrefixStore(Protocol):
    """Keeps the contents of blocks, by key and group, for longer than memory does."""

    def has(self, key: bytes, group: int) -> bool:
        """Whether the store may have this block."""

    def load(self, key: bytes, group: int, block_id: int) -> bool:
        """Fill `block_id`, which the caller owns; False if the store does not have the block."""

    def has_state(self, key: bytes) -> bool:
        """Whether the store may have the snapshot at the end of this block, see snapshots.py."""

    def load_state(self, key: bytes) -> Tensor | None:
        """That snapshot; None if the store does not have it."""

    def offer(self, keys: Sequence[bytes]) -> None:
        """Offer the blocks of a prefix, from the first to the last, for keeping, and the snapshots
        at their ends.
        """


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks of each group that hold the first `num_tokens` tokens of a request.

    `is_whole`: False if the store may have more blocks of it, to be fetched in later steps.
    """

    tables: list[list[int]]
    num_tokens: int
    block_size: int
    is_whole: bool = True

    @property
    def ends_in_shared_block(self) -> bool:
        """Whether the prefix ends within its last block, which is shared."""
        return self.num_tokens % self.block_size > 0


class PrefixCache:
    """Finds blocks of requests by their content, and makes blocks findable.

    A prefix of p tokens can be continued if every group holds what it needs: a full group all
    blocks before p, a window group those that the query at p reads. `root` stands for everything
    besides the tokens that keys and values depend on; without `by_content` only samples of the same
    request share blocks.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        block_size: int,
        root: bytes,
        *,
        by_content: bool,
        store: PrefixStore | None = None,
        snapshots: Snapshots | None = None,
    ) -> None:
        """`snapshots`: None for a model without recurrences."""
        self._snapshots = snapshots
        self._groups, self._block_size, self._root = groups, block_size, root
        self._by_content, self._store = by_content, store

    def find(self, request: Request, *, others_wait: bool) -> Prefix:
        """Blocks that already hold the request's first tokens, at most all but the newest one.

        The newest token is always computed, since its logits are needed. `others_wait`: fetch only
        a limited number of blocks from the store now. A prompt that is scored is computed whole.
        """
        if request.scores is not None:
            return self._prefix([], 0)
        size = self._block_size
        usable = request.num_tokens - 1
        # What a recurrence keeps of the prompt, its sample 0 has already changed.
        is_plain = self._snapshots is None
        if is_plain and (prefix := self._of_parent(request, usable)) is not None:
            return prefix
        if not self._by_content:
            return self._prefix([], 0)
        keys = self._keys(request, usable // size)
        is_whole = True
        if self._store is not None:
            most = _FETCHED_AT_ONCE if others_wait else len(keys) * len(self._groups)
            is_whole = self._fetch(self._store, keys, most)
        count = self._longest(keys, self._is_held, self._has_state)
        if self._snapshots is not None:
            # A third request that begins so will find a snapshot there.
            request.borders |= {self._longest(keys, self._is_held) * size}
        return replace(self._prefix(keys, count), is_whole=is_whole)

    def register(self, request: Request, num_tokens: int) -> None:
        """Make the blocks of the request's first `num_tokens` tokens findable."""
        if not self._by_content:
            return
        num_full = num_tokens // self._block_size
        if num_full == request.num_registered_blocks:
            return  # the usual case: no block was filled
        keys = self._keys(request, num_full)
        for group, table in zip(self._groups, request.tables, strict=True):
            for i in range(request.num_registered_blocks, num_full):
                group.pool.register(table[i], keys[i])
        request.num_registered_blocks = num_full

    def state(self, request: Request, num_tokens: int) -> Tensor:
        """The snapshot after the first `num_tokens` tokens of a prefix that was found."""
        assert self._snapshots is not None
        return self._snapshots.find(request.block_keys[num_tokens // self._block_size - 1])

    def keep_state(self, request: Request, num_tokens: int, values: Tensor, *, rolls: bool) -> None:
        """Make the state after the request's first `num_tokens` tokens findable; `rolls`: until
        there is a later one.
        """
        if self._snapshots is None or not self._by_content:
            return
        key = self._keys(request, num_tokens // self._block_size)[-1]
        self._snapshots.put(key, values, rolls=rolls)
        if request.rolling_key not in (None, key):
            self._snapshots.roll(request.rolling_key)
        request.rolling_key = key

    def keep(self, request: Request) -> None:
        """Offer the registered blocks of a request, which is about to free them, to the store; and
        pin those that it wants to be kept for longer.
        """
        num_blocks = min(request.num_registered_blocks, request.num_to_keep // self._block_size)
        for key in reversed(request.block_keys[:num_blocks]):
            for group in self._groups:
                group.pool.pin(key)
            if self._snapshots is not None:
                self._snapshots.pin(key)
        if self._store is not None and request.num_registered_blocks:
            self._store.offer(request.block_keys[: request.num_registered_blocks])

    def _of_parent(self, request: Request, usable: int) -> Prefix | None:
        """The prompt blocks that sample 0 of the same request holds; None if it is not running, or
        has advanced so far that a window group has freed the end of the prompt.
        """
        parent = request.parent
        if parent is None or parent.status is not RequestStatus.RUNNING:
            return None
        num_tokens = min(request.num_prompt_tokens, usable)
        tables = []
        for group, table in zip(self._groups, parent.tables, strict=True):
            shared = list(table[: group.blocks_of(num_tokens)])
            if NULL_BLOCK_ID in shared[group.first_needed(num_tokens) :]:
                return None
            tables.append(shared)
        return Prefix(tables, num_tokens, self._block_size)

    def _prefix(self, keys: Sequence[bytes], count: int) -> Prefix:
        """The prefix of the first `count` blocks, which must be in memory."""
        tables = []
        for group in self._groups:
            first = group.first_needed(count * self._block_size)
            held = [group.pool.find(key) or NULL_BLOCK_ID for key in keys[first:count]]
            tables.append([NULL_BLOCK_ID] * first + held)
        return Prefix(tables, count * self._block_size, self._block_size)

    def _is_held(self, group: int, key: bytes) -> bool:
        return self._groups[group].pool.find(key) is not None

    def _has_state(self, key: bytes) -> bool:
        return self._snapshots is None or self._snapshots.has(key)

    def _longest(
        self,
        keys: Sequence[bytes],
        is_held: Callable[[int, bytes], bool],
        has_state: Callable[[bytes], bool] = lambda key: True,
    ) -> int:
        """The number of blocks of the longest prefix that every group can continue, and that ends
        in a block that `has_state`.
        """
        limit = len(keys)
        for number, group in enumerate(self._groups):
            if group.window is None:
                limit = next((i for i in range(limit) if not is_held(number, keys[i])), limit)
        # For each window group: the length of the run of held blocks that ends at each index.
        runs: list[tuple[BlockGroup, list[int]]] = []
        for number, group in enumerate(self._groups):
            if group.window is not None:
                lengths = [0]
                for key in keys[:limit]:
                    lengths.append(lengths[-1] + 1 if is_held(number, key) else 0)
                runs.append((group, lengths))

        def can_go_on(count: int) -> bool:
            if count and not has_state(keys[count - 1]):
                return False
            end = count * self._block_size
            return all(lengths[count] >= count - group.first_needed(end) for group, lengths in runs)

        return next(count for count in range(limit, -1, -1) if can_go_on(count))

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Content keys of the request's first `count` blocks, which must be full."""
        size, keys = self._block_size, request.block_keys
        while len(keys) < count:
            start = len(keys) * size
            parent_key = keys[-1] if keys else self._root + request.salt
            keys.append(hash_block(parent_key, request.token_ids[start : start + size]))
        return keys[:count]

    def _fetch(self, store: PrefixStore, keys: Sequence[bytes], count: int) -> bool:
        """Fill at most `count` free blocks with the store's part of a prefix; False if it may have
        more.
        """

        def may_be_had(group: int, key: bytes) -> bool:
            return self._is_held(group, key) or store.has(key, group)

        def state_may_be_had(key: bytes) -> bool:
            return self._has_state(key) or store.has_state(key)

        longest = self._longest(keys, may_be_had, state_may_be_had)
        is_whole = True
        held: list[list[int]] = [[] for _ in self._groups]
        for number, group in enumerate(self._groups):
            pool, own = group.pool, held[number]
            wanted = keys[group.first_needed(longest * self._block_size) : longest]
            # Take the blocks in memory first, so that none of them is reused for another.
            own += [block_id for key in wanted if (block_id := pool.find(key)) is not None]
            pool.share(own)
            for key in wanted:
                if pool.find(key) is not None:
                    continue
                if pool.num_free_blocks == 0:
                    break
                if count == 0:
                    is_whole = False
                    break
                [block_id] = pool.allocate(1)
                own.append(block_id)
                if not store.load(key, number, block_id):
                    break
                pool.register(block_id, key)
                count -= 1
        for group, own in zip(self._groups, held, strict=True):
            group.release(own)
        if is_whole and longest and self._snapshots is not None:
            last = keys[longest - 1]
            values = None if self._has_state(last) else store.load_state(last)
            if values is not None:
                self._snapshots.put(last, values, rolls=False)
        return is_whole
