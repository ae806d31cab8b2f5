"""Computes logits at every position of a text, for evaluation; without requests or a scheduler."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from localllm.model.architecture import SlotSizes
from localllm.model.decoder import DecoderModel
from localllm.model.inputs import ForwardBatch, GroupTables
from localllm.model.key_means import key_means
from localllm.model.paged_kv_cache import PagedKVCache
from localllm_kernels.attention.four_bits import KeyCoding
from localllm_kernels.recurrence.state_cache import StateSlots

BLOCK_SIZE = 16
# Tokens in one forward pass, and rows of logits held at once; both limit memory.
CHUNK_TOKENS = 512
CHUNK_LOGIT_ROWS = 128


class WindowScorer:
    """Runs a decoder over independent windows of at most `max_tokens` tokens."""

    def __init__(
        self,
        model: DecoderModel,
        max_tokens: int,
        kv_dtype: torch.dtype | None = None,
        codings: Sequence[KeyCoding] = (),
    ) -> None:
        self._model = model
        self._num_blocks = -(-max_tokens // BLOCK_SIZE)
        self._device = model.embedding.device
        dtype = kv_dtype or model.embedding.dtype
        groups = model.architecture.cache_groups
        # Block 0 is the null block.
        counts = [1 + self._num_blocks] * len(groups)
        self._kv_cache = PagedKVCache.allocate(
            model.architecture,
            counts,
            BLOCK_SIZE,
            dtype,
            self._device,
            SlotSizes(1),
            turns_keys=model.ops.traits.turns_keys,
            codings=codings,
            key_means=key_means(model, dtype),
            uncoded_dtype=model.embedding.dtype,
        )

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int], first: int = 0) -> Iterator[Tensor]:
        """Yield the logits after each token from index `first` on, float32 [rows, vocab_size]."""
        for start in range(0, len(token_ids), CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, len(token_ids))
            hidden = self._model.forward(self._batch(token_ids, start, end), self._kv_cache)
            wanted = hidden[max(0, first - start) : end - start]
            for rows in torch.split(wanted, CHUNK_LOGIT_ROWS):
                if len(rows):
                    yield self._model.compute_logits(rows)

    def _batch(self, token_ids: Sequence[int], start: int, end: int) -> ForwardBatch:
        positions = torch.arange(start, end, device=self._device)
        table = torch.arange(1, 1 + self._num_blocks, dtype=torch.int32, device=self._device)
        tables = GroupTables(positions + BLOCK_SIZE, table[None, :])
        return ForwardBatch(
            input_ids=torch.tensor(token_ids[start:end], device=self._device),
            positions=positions,
            tables=(tables,) * len(self._kv_cache.stacks),
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32, device=self._device),
            seq_lens=torch.tensor([end], device=self._device),
            max_query_len=end - start,
            logit_rows=torch.empty(0, dtype=torch.int64, device=self._device),
            num_logit_rows=0,
            states=StateSlots((0,), (0, end - start), (start,), (start,), (end,)),
        )
