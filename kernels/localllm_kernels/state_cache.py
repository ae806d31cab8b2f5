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
    float32 [num_slots, ...], of recurrences that have one.
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
        """Write the inputs before `position`, of which `inputs` are the last ones, to their places;
        those before position 0 have none.
        """
        count = min(position, len(inputs), self.rows.shape[1])
        self.rows[slot, self.between(position - count, position)] = inputs[len(inputs) - count :]

    def num_values(self, position: int) -> int:
        """How many values a slot holds of the tokens before `position`."""
        count = min(position, self.num_rows) * self.rows.shape[-1]
        return count if self.matrix is None else count + self.matrix[0].numel()

    def read(self, slot: int, position: int, into: Tensor) -> int:
        """Copy what the slot holds of the tokens before `position` to the start of `into`, float32
        on the host; returns how many values.
        """
        parts = [self.rows[slot, self.places(position)]]
        if self.matrix is not None:
            parts.append(self.matrix[slot])
        count = 0
        for part in parts:
            values = part.contiguous().cpu()
            # Not by torch, whose threads would go on spinning beside ours.
            ctypes.memmove(into[count:].data_ptr(), values.data_ptr(), values.nbytes)
            count += values.numel()
        return count

    def write(self, slot: int, position: int, values: Tensor) -> int:
        """Fill a slot with the start of `values`, which `read` wrote, uint8; returns how many
        bytes.
        """
        places, width = self.places(position), self.rows.shape[-1]
        count = len(places) * width
        size = 0 if self.matrix is None else self.matrix[slot].numel()
        # A view as another dtype needs an aligned start, which the clone has.
        own = values[: 4 * (count + size)].clone().view(torch.float32).to(self.rows.device)
        self.rows[slot, places] = own[:count].view(-1, width)
        if self.matrix is not None:
            self.matrix[slot] = own[count:].view(self.matrix[slot].shape)
        return own.nbytes


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
    rows that are no drafts. `tables`: see `on`.
    """

    slots: tuple[int, ...]
    bounds: tuple[int, ...]
    starts: tuple[int, ...]
    stands: tuple[int, ...]
    settled: tuple[int, ...]
    saves: tuple[StateSave, ...] = ()
    tables: tuple[Tensor, Tensor] | None = None

    def on(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same for kernels, `tables` if they are there. Of each request int64 [8]: its slot,
        first row, position of that and one past its last, where its matrix stands and is to be
        left, and its first copy and one past its last. Of each copy int64 [2]: position and slot.
        """
        if self.tables is not None:
            return self.tables
        ends = [start + self.bounds[i + 1] - self.bounds[i] for i, start in enumerate(self.starts)]
        first = [sum(each.request < i for each in self.saves) for i in range(len(ends) + 1)]
        columns = self.slots, self.bounds[:-1], self.starts, ends, self.stands, self.settled
        requests = zip(*columns, first[:-1], first[1:], strict=True)
        saves = [(self.starts[each.request] + each.num_rows, each.slot) for each in self.saves]
        # One that is not read, so that there is an address.
        pairs = [list(requests), saves or [(0, 0)]]
        found = [torch.tensor(each, dtype=torch.int64).to(device) for each in pairs]
        return found[0], found[1]
