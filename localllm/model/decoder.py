"""The decoder: embedding, layers, final norm, head. One class for every architecture."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from localllm.model.config import ModelConfig
from localllm.model.inputs import ForwardBatch, PagedKVCache
from localllm.model.layers import DecoderLayer, RMSNorm, Rotation
from localllm.model.linear import Projection
from localllm.model.rope import RopeTable
from localllm_kernels import Ops
from localllm_kernels.fused_decoder import FusedDecoder


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """A loaded model; holds weights and no state of any request."""

    config: ModelConfig
    embedding: Tensor  # [vocab_size, hidden]
    layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    lm_head: Projection
    rope: RopeTable
    ops: Ops
    # The layers and the last norm as one operator, where there is one for them.
    fused: FusedDecoder | None = None

    def forward(self, batch: ForwardBatch, kv_cache: PagedKVCache) -> Tensor:
        """Hidden states [padded_tokens, hidden] of the batch's tokens, after the final norm.

        Writes the new tokens' keys and values to `kv_cache`.
        """
        ops = self.ops
        rotation = Rotation(self.rope.cos[batch.positions], self.rope.sin[batch.positions])
        residual = F.embedding(batch.input_ids, self.embedding).to(self.norm.weight.dtype)
        num_rows = batch.input_ids.shape[0]
        if self.fused is not None and self.fused.takes(num_rows, batch.max_query_len):
            return self.fused(
                residual,
                rotation.cos,
                rotation.sin,
                kv_cache.stacked,
                slot_mapping=batch.slot_mapping,
                block_tables=batch.block_tables,
                cu_seqlens_q=batch.cu_seqlens_q,
                seq_lens=batch.seq_lens,
                max_query_len=batch.max_query_len,
            )
        x = ops.rms_norm(residual, self.layers[0].input_norm.weight, self.layers[0].input_norm.eps)
        # Each layer hands over its output normed for the next one, with the residual beside it.
        next_norms = [layer.input_norm for layer in self.layers[1:]] + [self.norm]
        for i, (layer, next_norm) in enumerate(zip(self.layers, next_norms, strict=True)):
            x = layer.attention(x, rotation, batch, kv_cache.layer(i), ops)
            norm = layer.post_attention_norm
            x, residual = ops.add_rms_norm(x, residual, norm.weight, norm.eps)
            x = layer.mlp(x, ops)
            x, residual = ops.add_rms_norm(x, residual, next_norm.weight, next_norm.eps)
        return x

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden`: [rows, hidden] -> float32 [rows, vocab_size]."""
        return self.lm_head(hidden).float()
