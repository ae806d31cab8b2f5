"""Runs the model on scheduled batches; owns the KV tensors."""

import torch
from torch import Tensor

from localllm.engine.batching import build_forward_batch
from localllm.engine.scheduler import ScheduledBatch
from localllm.model.decoder import DecoderModel
from localllm.model.inputs import PagedKVCache
from localllm_kernels import Ops

# Float32 products on a CPU may give a row other bits when their rows are no multiple of this
# (see cpu_products.py and docs/architecture.md), so the batch is padded.
CPU_FLOAT32_ROW_MULTIPLE = 8


class ModelRunner:
    """A model and the cache its keys and values live in."""

    def __init__(self, model: DecoderModel, kv_cache: PagedKVCache) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._device = model.embedding.device
        is_float32 = self._device.type == "cpu" and model.embedding.dtype == torch.float32
        takes_torch = model.ops.linears is None
        self._row_multiple = CPU_FLOAT32_ROW_MULTIPLE if is_float32 and takes_torch else 1

    @property
    def ops(self) -> Ops:
        """The model's operators."""
        return self._model.ops

    @torch.inference_mode()
    def forward(self, batch: ScheduledBatch) -> Tensor:
        """Compute the batch's tokens; logits of its caught-up requests, float32 [rows, vocab]."""
        self._kv_cache.copy_blocks(batch.block_copies)
        inputs = build_forward_batch(
            batch, self._kv_cache.block_size, self._row_multiple, self._device
        )
        hidden = self._model.forward(inputs, self._kv_cache)
        if inputs.num_logit_rows == 0:
            return torch.empty((0, self._model.config.vocab_size), device=self._device)
        logits = self._model.compute_logits(hidden[inputs.logit_rows])
        return logits[: inputs.num_logit_rows]
