"""What is read of a prompt's last token in the place of an answer."""

from array import array
from collections.abc import Sequence

from torch import Tensor

from localllm.model.decoder import DecoderModel
from localllm.schedule.request import Request
from localllm.schedule.sampling_params import Pooling
from localllm.schedule.scheduler import ScheduledBatch


class Pooler:
    """Takes the last row of each request with `pooling`.

    The row sees the whole prompt, so cached prefixes, chunks and other requests change nothing.
    """

    def __init__(self, model: DecoderModel) -> None:
        """Taps the last norm of `model`."""
        self.taps: Sequence[int] = (model.architecture.num_layers,)
        self._model = model
        self._rows: dict[Request, Tensor] = {}

    def see(self, batch: ScheduledBatch, hidden: Tensor) -> None:
        """Read rows of a batch's `hidden` states, [num_tokens, hidden], as `Launched` has them."""
        end = 0
        for entry in batch.requests:
            end += entry.num_scheduled_tokens
            pooling = entry.request.params.pooling
            if pooling is not None and entry.catches_up:
                self._rows[entry.request] = self._read(hidden[end - 1], pooling)

    def take(self, request: Request) -> bytes | None:
        """What was read for a request that has ended, float32; None if it asked for nothing."""
        row = self._rows.pop(request, None)
        return None if row is None else array("f", row.float().tolist()).tobytes()

    def _read(self, row: Tensor, pooling: Pooling) -> Tensor:
        match pooling.kind:
            case "embedding":
                return row.clone()
            case "labels":
                return self._model.compute_scores(row[None])[0]
            case "logits":
                return self._model.compute_logits(row[None])[0, list(pooling.token_ids)]
