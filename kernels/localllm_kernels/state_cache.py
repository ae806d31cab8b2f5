"""Where recurrences keep what they need of a request's earlier tokens: a slot a request.

A short convolution needs its inputs at the last positions. They lie in a ring: the inputs of
position p at place p % ring. So a rejected draft needs no undoing, as long as the ring has room
for it: its places are written again by the tokens that stand there instead.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StateCache:
    """`rows`: float32 [num_slots, ring, width]; `num_rows`: inputs that are needed."""

    rows: Tensor
    num_rows: int

    def layer(self, index: int) -> "StateCache":
        """One layer of caches whose tensors have a first dimension of layers."""
        return StateCache(self.rows[index], self.num_rows)

    def places(self, position: int) -> Tensor:
        """The places in a slot of the inputs needed at `position`, int64 [at most num_rows]."""
        first = max(0, position - self.num_rows)
        return torch.arange(first, position, device=self.rows.device) % self.rows.shape[-2]

    def read(self, slot: int, position: int) -> Tensor:
        """What the slot holds of the tokens before `position`, uint8, on the host."""
        return self.rows[slot, self.places(position)].view(torch.uint8).flatten().cpu()

    def write(self, slot: int, position: int, values: Tensor) -> int:
        """Fill a slot with the start of `values`, which `read` gave; returns how many bytes."""
        places = self.places(position)
        own = values[: len(places) * self.rows.shape[-1] * self.rows.itemsize]
        # A view as another dtype needs an aligned start, which the clone has.
        rows = own.clone().view(self.rows.dtype).view(len(places), -1)
        self.rows[slot, places] = rows.to(self.rows.device)
        return len(own)


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
    each request's first row.
    """

    slots: tuple[int, ...]
    bounds: tuple[int, ...]
    starts: tuple[int, ...]
    saves: tuple[StateSave, ...] = ()
