"""Scores the tokens of prompts by the rows that compute them anyway."""

import torch
from torch import Tensor
from torch.nn import functional as F

from localllm.model.decoder import DecoderModel
from localllm.schedule.logprobs import PromptScores
from localllm.schedule.scheduler import ScheduledBatch, ScheduledRequest

# Rows of logits held at once, which limits memory.
_ROWS = 32


class PromptScorer:
    """Reads how likely each token of a prompt is, after those before it.

    A row sees the prompt up to its own token, so chunks and other requests change nothing.
    """

    def __init__(self, model: DecoderModel) -> None:
        self._model = model

    @torch.inference_mode()
    def see(self, batch: ScheduledBatch, hidden: Tensor) -> None:
        """Read rows of a batch's `hidden` states after the last norm, [num_tokens, hidden]."""
        end = 0
        for entry in batch.requests:
            start, end = end, end + entry.num_scheduled_tokens
            if entry.num_scored:
                assert entry.request.scores is not None
                self._score(entry, entry.request.scores, hidden[start : start + entry.num_scored])

    def _score(self, entry: ScheduledRequest, scores: PromptScores, hidden: Tensor) -> None:
        unit = self._model.ops.traits.row_unit
        for number, rows in enumerate(torch.split(hidden, _ROWS)):
            position = entry.start + number * _ROWS
            padded = F.pad(rows, (0, 0, 0, -len(rows) % unit))
            logits = self._model.compute_logits(padded)[: len(rows)]
            logprobs = torch.log_softmax(logits, dim=-1)
            following = entry.request.token_ids[position + 1 : position + 1 + len(rows)]
            targets = torch.tensor(following, device=logits.device)
            top = logprobs.topk(scores.num_top, dim=-1)
            scores.put(
                position,
                logprobs.gather(1, targets[:, None])[:, 0].tolist(),
                top.indices.flatten().tolist(),
                top.values.flatten().tolist(),
            )
