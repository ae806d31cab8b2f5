"""Blocks that hold the beginning of a request already: in memory, or in a store behind it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from localllm.engine.block_pool import BlockPool, hash_block
from localllm.engine.request import Request, RequestStatus

# Blocks that are fetched in a step for which others wait.
_FETCHED_AT_ONCE = 32


class PrefixStore(Protocol):
    """Keeps what blocks hold, by their keys, for longer than memory does."""

    def load(self, key: bytes, block_id: int) -> bool:
        """Fill a block, which is the caller's; False where there is nothing for the key."""

    def offer(self, keys: Sequence[bytes]) -> None:
        """The blocks of a beginning, the first to the last, that may be worth keeping."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Blocks that hold the first `num_tokens` tokens of a request.

    `is_whole`: whether more of them would have to be waited for.
    """

    block_ids: list[int]
    num_tokens: int
    block_size: int
    is_whole: bool = True

    @property
    def ends_in_shared_block(self) -> bool:
        """Whether the last block is full of tokens that are not all its own."""
        return self.num_tokens < len(self.block_ids) * self.block_size


class PrefixCache:
    """Finds the blocks of requests by their content, and makes them findable.

    `root` stands for everything besides the tokens that keys and values depend on; without
    `by_content` only the samples of one request share its blocks.
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        root: bytes,
        *,
        by_content: bool,
        store: PrefixStore | None = None,
    ) -> None:
        self._pool, self._block_size, self._root = pool, block_size, root
        self._by_content, self._store = by_content, store

    def find(self, request: Request, *, others_wait: bool) -> Prefix:
        """Blocks that already hold the request's first tokens, all but the newest at most.

        The newest token is always computed, since its logits are needed. `others_wait`: a store is
        read for a part only, if it has much.
        """
        size = self._block_size
        usable = request.num_tokens - 1
        parent = request.parent
        if parent is not None and parent.status is RequestStatus.RUNNING:
            num_tokens = min(request.num_prompt_tokens, usable)
            return Prefix(list(parent.block_table[: -(-num_tokens // size)]), num_tokens, size)
        if not self._by_content:
            return Prefix([], 0, size)
        keys = self._keys(request, usable // size)
        is_whole = True
        if self._store is not None:
            most = _FETCHED_AT_ONCE if others_wait else len(keys)
            is_whole = self._fetch(self._store, keys, most)
        block_ids = self._pool.match_prefix(keys)
        return Prefix(block_ids, len(block_ids) * size, size, is_whole)

    def register(self, request: Request, num_tokens: int) -> None:
        """Make the blocks of the request's first `num_tokens` tokens findable."""
        if not self._by_content:
            return
        num_full = num_tokens // self._block_size
        if num_full == request.num_registered_blocks:
            return  # as for fifteen tokens of sixteen
        keys = self._keys(request, num_full)
        for i in range(request.num_registered_blocks, num_full):
            self._pool.register(request.block_table[i], keys[i])
        request.num_registered_blocks = num_full

    def keep(self, request: Request) -> None:
        """Offer what was registered of a request, which gives its blocks back, to the store."""
        if self._store is not None and request.num_registered_blocks:
            self._store.offer(request.block_keys[: request.num_registered_blocks])

    def _keys(self, request: Request, count: int) -> list[bytes]:
        """Content keys of the request's first `count` blocks, which must be full of tokens."""
        size, keys = self._block_size, request.block_keys
        while len(keys) < count:
            start = len(keys) * size
            parent_key = keys[-1] if keys else self._root + request.salt
            keys.append(hash_block(parent_key, request.token_ids[start : start + size]))
        return keys[:count]

    def _fetch(self, store: PrefixStore, keys: Sequence[bytes], count: int) -> bool:
        """Fill free blocks with what the store has of a prefix, `count` of them at most; False
        where it may have more.
        """
        pool = self._pool
        held = pool.match_prefix(keys)
        if len(held) == len(keys):
            return True
        pool.share(held)
        is_whole = True
        for key in keys[len(held) :]:
            if known := pool.match_prefix([key]):
                pool.share(known)
                held += known
                continue
            if pool.num_free_blocks == 0:
                break
            if count == 0:
                is_whole = False
                break
            [block_id] = pool.allocate(1)
            held.append(block_id)
            if not store.load(key, block_id):
                break
            pool.register(block_id, key)
            count -= 1
        pool.free(reversed(held))
        return is_whole
