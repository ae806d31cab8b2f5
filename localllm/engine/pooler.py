"""Embeddings: what the model's last norm makes of a prompt's last token."""

from array import array
from collections.abc import Sequence

from torch import Tensor

from localllm.engine.request import Request
from localllm.engine.scheduler import ScheduledBatch


class Pooler:
    """Takes the last row of each request that asks for an embedding.

    The row sees the whole prompt, so cached prefixes, chunks and other requests change nothing.
    """

    def __init__(self, num_layers: int) -> None:
        """`num_layers`: of the model, which is also the tap of its last norm."""
        self.taps: Sequence[int] = (num_layers,)
        self._rows: dict[Request, Tensor] = {}

    def see(self, batch: ScheduledBatch, hidden: Tensor) -> None:
        """Take rows of a batch's `hidden` states, [num_tokens, hidden], as `Launched` has them."""
        end = 0
        for entry in batch.requests:
            end += entry.num_scheduled_tokens
            if entry.request.params.embeds and entry.catches_up:
                self._rows[entry.request] = hidden[end - 1].clone()

    def take(self, request: Request) -> bytes | None:
        """The embedding of a request that has ended, float32; None if it asked for none."""
        row = self._rows.pop(request, None)
        return None if row is None else array("f", row.float().tolist()).tobytes()
