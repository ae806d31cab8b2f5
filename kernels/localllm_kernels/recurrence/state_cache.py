"""Where recurrences keep what they need of a request's earlier tokens: a slot a request.

A short convolution needs its inputs at the last positions. They lie in a ring: the inputs of
position p at place p % ring. So a rejected draft needs no undoing, as long as the ring has room
for it: its places are written again by the tokens that stand there instead.
"""

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateCache:
    """`rows`: float32 [num_slots, ring, width]; `num_rows`: inputs that are needed; `matrix`:
    float32 or float16 [num_slots, ...], of recurrences that have one; in float16 it is rounded at
    every token, so that its bits do not depend on where a step ends.
    """

    rows: Tensor
    num_rows: int
    matrix: Tensor | None = None

    def layer(self, index: int) -> "StateCache":
        """One layer of caches whose tensors have a first dimension of layers."""
        matrix = None if self.matrix is None else self.matrix[index]
        return StateCache(self.rows[index], self.num_rows, matrix)

    def between(self, first: int, end: int) -> Tensor:
        """The places in a slot of the inputs of positions from `first` to `end`, int64."""
        return torch.arange(first, end, device=self.rows.device) % self.rows.shape[-2]

    def places(self, position: int) -> Tensor:
        """The places in a slot of the inputs needed at `position`, int64 [at most num_rows]."""
        return self.between(max(0, position - self.num_rows), position)

    def keep(self, slot: int, inputs: Tensor, position: int) -> None:
        """Write to their places the inputs before `position`, the last ones of `inputs`."""
        count = min(position, len(inputs), self.rows.shape[1])
        self.rows[slot, self.between(position - count, position)] = inputs[len(inputs) - count :]

    def num_bytes(self, position: int) -> int:
        """Bytes of what a slot holds of the tokens before `position`."""
        of_rows = 4 * min(position, self.num_rows) * self.rows.shape[-1]
        return of_rows if self.matrix is None else of_rows + self.matrix[0].nbytes

    def parts(self, slot: int, position: int) -> list[Tensor]:
        """What a slot holds of the tokens before `position`, on its device."""
        rows = self.rows[slot, self.places(position)]
        return [rows] if self.matrix is None else [rows, self.matrix[slot]]

    def read(self, slot: int, position: int, into: Tensor) -> int:
        """Copy what the slot holds before `position` into `into`, uint8; returns how many bytes."""
        count = 0
        for part in self.parts(slot, position):
            values = part.contiguous().cpu()
            # Not by torch, whose threads would go on spinning beside ours.
            ctypes.memmove(into[count:].data_ptr(), values.data_ptr(), values.nbytes)
            count += values.nbytes
        return count

    def write(self, slot: int, position: int, values: Tensor) -> int:
        """Fill a slot from what `read` wrote, uint8; returns how many bytes that takes."""
        places, width = self.places(position), self.rows.shape[-1]
        of_rows, end = 4 * len(places) * width, self.num_bytes(position)
        # A view as another dtype needs an aligned start, which the clone has.
        own = values[:end].clone().to(self.rows.device)
        self.rows[slot, places] = own[:of_rows].view(torch.float32).view(-1, width)
        if self.matrix is not None:
            matrix = self.matrix[slot]
            matrix.copy_(own[of_rows:].view(matrix.dtype).view(matrix.shape))
        return end


@dataclass(frozen=True, slots=True)
class StateSave:
    """A copy, in another slot, of a request's state within a batch.

    `request`: its place in the batch; `num_rows`: how many of its new rows the state has seen.
    """

    request: int
    num_rows: int
    slot: int


@dataclass(frozen=True, slots=True)
class StateSlots:
    """The slot of each request of a batch, and the copies to make, in order of rows.

    `bounds`: where each request's rows start, and one past the last row; `starts`: the position of
    each request's first row. `stands`: the position before which each slot's matrix has seen all
    tokens, at most the longest draft before `starts`; `settled`: that to leave it at, behind the
    rows that are no drafts.
    """

    slots: tuple[int, ...]
    bounds: tuple[int, ...]
    starts: tuple[int, ...]
    stands: tuple[int, ...]
    settled: tuple[int, ...]
    saves: tuple[StateSave, ...] = ()

    @property
    def on_host(self) -> "StateSlots":
        """Itself; see `StateTables.on_host`."""
        return self

    def on(self, device: torch.device) -> "StateTables":
        """The same for kernels."""
        found = [torch.tensor(each, dtype=torch.int64).to(device) for each in self.rows_of_tables()]
        longest = max(self.bounds[i + 1] - first for i, first in enumerate(self.bounds[:-1]))
        return StateTables(found[0], found[1], longest)

    def rows_of_tables(self) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
        """The rows of `StateTables.requests` and `saves`, of which there is at least one."""
        ends = [start + self.bounds[i + 1] - self.bounds[i] for i, start in enumerate(self.starts)]
        first = [sum(each.request < i for each in self.saves) for i in range(len(ends) + 1)]
        columns = self.slots, self.bounds[:-1], self.starts, ends, self.stands, self.settled
        requests = list(zip(*columns, first[:-1], first[1:], strict=True))
        saves = [(self.starts[each.request] + each.num_rows, each.slot) for each in self.saves]
        # One that is not read, so that there is an address.
        return requests, [*saves] or [(0, 0)]


@dataclass(frozen=True, slots=True)
class StateTables:
    """`StateSlots` as kernels read them, on their device.

    `requests`: int64 [num_requests, 8]: each one's slot, first row, position of that and one past
    its last, where its matrix stands and is to be left, its first copy and one past its last;
    `saves`: int64 [num_saves, 2]: of each copy position and slot; `longest`: the most rows of a
    request. A request without rows is padding.
    """

    requests: Tensor
    saves: Tensor
    longest: int

    def on(self, device: torch.device) -> "StateTables":
        """Itself."""
        return self

    @property
    def on_host(self) -> StateSlots:
        """The same for operators that read them in Python, which waits for the device."""
        pairs = self.saves.tolist()
        rows = self.requests.tolist()
        slots, firsts, starts, ends, stands, settled, *_ = map(tuple, zip(*rows, strict=True))
        saves = (
            StateSave(i, position - row[2], slot)
            for i, row in enumerate(rows)
            for position, slot in pairs[row[6] : row[7]]
        )
        bounds = (*firsts, firsts[-1] + ends[-1] - starts[-1])
        return StateSlots(slots, bounds, starts, stands, settled, tuple(saves))


States = StateSlots | StateTables
