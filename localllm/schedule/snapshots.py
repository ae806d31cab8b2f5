"""States of recurrences, kept in host memory for requests that begin alike.

Keys and values lie in blocks, which any request can go on from. A recurrence has one state, of all
tokens before it, so a request can only go on where that state was copied: a **snapshot**, at the
end of a block, found by the key of that block. `positions` says where to take them. A snapshot
that lies at no border **rolls**: the request's next one replaces it, so that a long answer keeps
one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# Snapshots that stay lie this many tokens apart at most; those that roll come every so many tokens
# of an answer, and of a prompt.
STRIDE, ROLL, _ROLL_OF_PROMPT = 1024, 32, 512
# A copy costs as much as some tokens, so all but the newest of borders in a row lie this far apart.
APART, NEWEST = 128, 4
# The share of the quota that may be pinned is one of so many.
_PINNED_SHARE = 2
# Snapshots in a step: at least and at most so many, and between these as many as take so few bytes.
_LEAST, _MOST, _STEP_BYTES = 4, 32, 256 << 20


def snapshots_per_step(slot_bytes: int) -> int:
    """How many snapshots a step can take, of `slot_bytes` each; 0 if there is nothing to take."""
    return min(_MOST, max(_LEAST, _STEP_BYTES // slot_bytes)) if slot_bytes else 0


def spread(borders: Collection[int]) -> frozenset[int]:
    """The borders to take snapshots for: the first, the newest, since there a prompt is changed or
    gone on from, and of the others those that save more tokens than a copy costs.
    """
    *earlier, last = sorted(borders)
    kept: list[int] = []
    for border in earlier:
        if not kept or border - kept[-1] >= APART:
            kept.append(border)
    return frozenset({*kept, *earlier[1 - NEWEST :], last})


def positions(
    start: int, end: int, borders: Collection[int], block_size: int
) -> list[tuple[int, bool]]:
    """The positions after `start`, up to `end`, at which a step over these tokens takes snapshots,
    and of each whether it rolls.

    `borders`: where messages end. A snapshot lies at the last end of a block before one.
    """
    stay = {border // block_size * block_size for border in borders}
    stay |= set(range(start // STRIDE * STRIDE, end + 1, STRIDE))
    found = {position: False for position in stay if start < position <= end}
    last = end // block_size * block_size
    every = ROLL if end - start <= ROLL else _ROLL_OF_PROMPT
    if start < last and start // every < last // every:
        found.setdefault(last, True)
    return sorted(found.items())


@dataclass(slots=True)
class _Snapshot:
    values: Tensor
    rolls: bool
    is_pinned: bool = False


class Snapshots:
    """Snapshots by key, at most `quota_bytes` of them; the ones unused for longest go first, and
    pinned ones last, as long as they take no more than a share of the quota.

    A step can take `per_step` of them.
    """

    def __init__(self, quota_bytes: int, per_step: int) -> None:
        self.quota_bytes, self.per_step = quota_bytes, per_step
        self.num_bytes = 0
        self._held: OrderedDict[bytes, _Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._held)

    def has(self, key: bytes) -> bool:
        """Whether there is a snapshot at the end of the block `key`."""
        return key in self._held

    def find(self, key: bytes) -> Tensor:
        """The snapshot at the end of the block `key`, which must be there."""
        self._held.move_to_end(key)
        return self._held[key].values

    def put(self, key: bytes, values: Tensor, *, rolls: bool) -> None:
        """Keep a snapshot at the end of the block `key`, unless it is larger than the quota."""
        if key in self._held:
            self._held[key].rolls &= rolls
            self._held.move_to_end(key)
            return
        if values.nbytes > self.quota_bytes:
            return
        self._held[key] = _Snapshot(values, rolls)
        self.num_bytes += values.nbytes
        while self.num_bytes > self.quota_bytes:
            self._drop_one()

    def pin(self, key: bytes) -> None:
        """Pin the snapshot at the end of the block `key`, if there is one."""
        if key in self._held:
            self._held[key].is_pinned = True
            self._held.move_to_end(key)

    def _drop_one(self) -> None:
        pinned = sum(each.values.nbytes for each in self._held.values() if each.is_pinned)
        may_stay = pinned <= self.quota_bytes // _PINNED_SHARE
        key = next(
            (key for key, each in self._held.items() if not (may_stay and each.is_pinned)),
            next(iter(self._held)),
        )
        self.num_bytes -= self._held.pop(key).values.nbytes

    def roll(self, key: bytes) -> None:
        """Drop the snapshot at the end of the block `key`, if it is there and rolls."""
        if key in self._held and self._held[key].rolls:
            self.num_bytes -= self._held.pop(key).values.nbytes
