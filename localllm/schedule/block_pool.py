"""Blocks of the KV cache: who uses them, what they hold, and which one is reused next.

A block is in one of three states. *Used*: `ref_count` requests have it in their block tables.
*Cached*: no request uses it, but it is full and its content key is known, so a later request with
the same prefix can reuse it; cached blocks are in the free list, oldest first. *Empty*: also in the
free list, in front of the cached ones.

A cached block may be *pinned*: it then waits in a list of its own, and is reused only when all
others are in use. Pinned blocks take up to a share of the pool; beyond it the ones unused for
longest are pinned no more.

The key of a full block is sha256 over the previous block's key and its own token ids, so equal keys
mean equal prefixes. The first block continues from a root key that stands for everything else that
keys and values depend on.
"""

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

NULL_BLOCK_ID = 0
# The share of the blocks that may be pinned is one of so many.
_PINNED_SHARE = 2


def hash_block(parent_key: bytes, token_ids: Sequence[int]) -> bytes:
    """Content key of a full block that follows the block with `parent_key`."""
    return hashlib.sha256(parent_key + array("q", token_ids).tobytes()).digest()


@dataclass(slots=True, eq=False)
class Block:
    """A block; `previous` and `next` link it into the free list."""

    block_id: int
    ref_count: int = 0
    key: bytes | None = None
    is_pinned: bool = False
    previous: "Block | None" = field(default=None, repr=False)
    next: "Block | None" = field(default=None, repr=False)


class FreeList:
    """A doubly linked list with O(1) removal from the middle, which a deque does not have.

    Allocation takes blocks from the front; a prefix hit takes a cached block out of the middle.
    """

    def __init__(self) -> None:
        self._head, self._tail = Block(-1), Block(-1)
        self._head.next, self._tail.previous = self._tail, self._head
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next
        while block is not None and block is not self._tail:
            yield block
            block = block.next

    def append(self, block: Block) -> None:
        """Put `block` at the end, to be allocated last."""
        assert self._tail.previous is not None
        self._insert_after(self._tail.previous, block)

    def prepend(self, block: Block) -> None:
        """Put `block` at the front, to be allocated next."""
        self._insert_after(self._head, block)

    def remove(self, block: Block) -> None:
        """Remove `block`, wherever it is in the list."""
        assert block.previous is not None
        assert block.next is not None
        block.previous.next, block.next.previous = block.next, block.previous
        block.previous = block.next = None
        self._length -= 1

    def pop_front(self) -> Block:
        """Remove and return the first block; the list must not be empty."""
        block = self._head.next
        assert block is not None
        self.remove(block)
        return block

    def _insert_after(self, place: Block, block: Block) -> None:
        assert block.next is None
        follower = place.next
        assert follower is not None
        block.previous, block.next = place, follower
        place.next = follower.previous = block
        self._length += 1


class BlockPool:
    """All blocks of the KV cache. Block 0 is the null block and is never allocated."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 2, "a null block and at least one more"
        self.blocks = [Block(i) for i in range(num_blocks)]
        self._free = FreeList()
        for block in self.blocks[1:]:
            self._free.append(block)
        self._pinned = FreeList()
        self._cached: dict[bytes, Block] = {}

    @property
    def num_usable_blocks(self) -> int:
        """The number of blocks that requests can use."""
        return len(self.blocks) - 1

    @property
    def num_free_blocks(self) -> int:
        """The number of blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._pinned)

    def is_shared(self, block_id: int) -> bool:
        """Whether the block has several users or can be found by its key; do not write to it."""
        block = self.blocks[block_id]
        return block.ref_count > 1 or block.key is not None

    def find(self, key: bytes) -> int | None:
        """The block with content key `key`, if there is one; changes nothing."""
        block = self._cached.get(key)
        return None if block is None else block.block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Add one user to each block; a cached block leaves the free list."""
        for block_id in block_ids:
            block = self.blocks[block_id]
            if block.ref_count == 0:
                self._waiting(block).remove(block)
            block.ref_count += 1

    def pin(self, key: bytes) -> None:
        """Pin the block with content key `key`, if there is one."""
        block = self._cached.get(key)
        if block is None or block.is_pinned:
            return
        block.is_pinned = True
        if block.ref_count == 0:
            self._free.remove(block)
            self._let_wait(block)

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks: empty ones first, then the least recently used cached ones,
        whose keys are dropped; pinned ones last.
        """
        assert count <= self.num_free_blocks
        blocks = [(self._free or self._pinned).pop_front() for _ in range(count)]
        for block in blocks:
            block.is_pinned = False
            if block.key is not None:
                del self._cached[block.key]
                block.key = None
            block.ref_count = 1
        return [block.block_id for block in blocks]

    def register(self, block_id: int, key: bytes) -> None:
        """Make a full block findable by `key`; if another block has that key, that one keeps it."""
        block = self.blocks[block_id]
        assert block.ref_count > 0
        assert block.key is None
        if key not in self._cached:
            self._cached[key] = block
            block.key = key

    def free(self, block_ids: Iterable[int]) -> None:
        """Remove one user from each block; blocks with a key are reused in the order given.

        Callers pass a request's blocks last to first, so the end of a prefix, which fewer requests
        can share, is reused before its beginning.
        """
        for block_id in block_ids:
            block = self.blocks[block_id]
            assert block.ref_count > 0
            block.ref_count -= 1
            if block.ref_count:
                continue
            if block.key is None:
                self._free.prepend(block)
                continue
            self._let_wait(block)

    def _let_wait(self, block: Block) -> None:
        self._waiting(block).append(block)
        if len(self._pinned) > self.num_usable_blocks // _PINNED_SHARE:
            oldest = self._pinned.pop_front()
            oldest.is_pinned = False
            self._free.append(oldest)

    def _waiting(self, block: Block) -> FreeList:
        """Where a block is that nobody uses."""
        return self._pinned if block.is_pinned else self._free

    def check_invariants(self, block_tables: Iterable[Sequence[int]]) -> None:
        """Assert that reference counts, free list and keys match the block tables in use."""
        users = [0] * len(self.blocks)
        for table in block_tables:
            held = [block_id for block_id in table if block_id != NULL_BLOCK_ID]
            assert len(set(held)) == len(held), "a block twice in one table"
            for block_id in held:
                users[block_id] += 1
        free = {block.block_id for waiting in (self._free, self._pinned) for block in waiting}
        assert len(free) == self.num_free_blocks
        assert all(block.is_pinned and block.key is not None for block in self._pinned)
        assert not any(block.is_pinned for block in self._free)
        assert NULL_BLOCK_ID not in free
        for block in self.blocks[1:]:
            assert block.ref_count == users[block.block_id], f"{block} has {users[block.block_id]}"
            assert (block.ref_count == 0) == (block.block_id in free)
            assert block.key is None or self._cached[block.key] is block
        assert all(block.key == key for key, block in self._cached.items())
