"""What a checkpoint gives in transformers, and what ours gives beside it."""

from typing import Any

import torch
from transformers import DynamicCache

from localllm import LLM
from localllm.schedule.scheduler import ScheduledBatch


@torch.no_grad()
def logprobs_of(oracle: Any, ids: list[int], sizes: list[int]) -> torch.Tensor:
    """Logprobs after each token, [len(ids), vocab], computed in chunks of `sizes`."""
    cache, parts = DynamicCache(config=oracle.config), []
    for chunk in torch.tensor([ids]).split(sizes, dim=1):
        parts.append(oracle(chunk, past_key_values=cache, use_cache=True).logits[0].float())
    return torch.log_softmax(torch.cat(parts), -1)


def record_logits(llm: LLM) -> list[torch.Tensor]:
    """A list that grows by the logits of every step that samples."""
    runner = llm.model.text_engine.engine._runner
    recorded: list[torch.Tensor] = []
    forward = runner.forward

    def forward_recorded(batch: ScheduledBatch, hidden: torch.Tensor | None = None) -> torch.Tensor:
        logits = forward(batch)
        if len(logits):
            recorded.append(logits)
        return logits

    runner.forward = forward_recorded  # type: ignore[method-assign]
    return recorded
