"""The decoder: embedding, layers, final norm, head. One class for every architecture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm.model.blocks.block import BlockInputs
from localllm.model.fused.decoder import FusedDecoder
from localllm.model.inputs import ForwardBatch, PagedKVCache
from localllm.model.layer import Layer
from localllm.model.linear import Projection
from localllm.model.norm import Norm
from localllm.model.rope import RopeTables
from localllm_kernels import Ops


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """A loaded model; holds weights and no state of any request."""

    architecture: Architecture
    embedding: Tensor  # [vocab_size, hidden]
    row_dtype: torch.dtype  # of the residual stream
    layers: tuple[Layer, ...]
    norm: Norm
    lm_head: Projection
    ropes: RopeTables
    ops: Ops
    # The layers and the final norm in one call, if that is supported for them.
    fused: FusedDecoder | None = None

    def forward(self, batch: ForwardBatch, kv_cache: PagedKVCache) -> Tensor:
        """Hidden states [padded_tokens, hidden] of the batch's tokens, after the final norm.

        Writes the new tokens' keys and values to `kv_cache`.
        """
        return self.forward_tapped(batch, kv_cache, ())[0]

    def forward_tapped(
        self, batch: ForwardBatch, kv_cache: PagedKVCache, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Like `forward`, and also the residual stream after each layer in `taps`, [padded_tokens,
        hidden]. A tap equal to the number of layers means the output of the final norm.
        """
        ops = self.ops
        rotations = self.ropes.rotations(batch.positions)
        residual = self._embed(batch.input_ids)
        if self.fused is not None and self.fused.takes(batch):
            x, found = self.fused(residual, rotations, batch, kv_cache, taps)
            return x, _tapped(taps, found, x)
        sublayers = [sublayer for layer in self.layers for sublayer in layer.sublayers]
        first, *others = (sublayer.norm for sublayer in sublayers)
        x = residual if first is None else first(residual, ops)
        # Each block's output is added to the residual and normed for the next block.
        next_norms = iter([*others, self.norm])
        streams: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            place = kv_cache.places[i]
            tables = None if place is None else batch.tables[place[0]]
            inputs = BlockInputs(ops, batch, rotations, kv_cache.layer(i), tables)
            for sublayer in layer.sublayers:
                output, norm = sublayer.output(x, inputs), next(next_norms)
                if norm is None or sublayer.place.shares_input:
                    residual = residual + output
                    x = x if sublayer.place.shares_input else residual
                else:
                    x, residual = norm.after_sum(output, residual, ops)
            if i in taps:
                streams[i] = residual
        return x, _tapped(taps, streams, x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden`: [rows, hidden] -> float32 [rows, vocab_size]."""
        logits, cap = self.lm_head(hidden).float(), self.architecture.logit_cap
        if self.architecture.logit_scale != 1:
            logits = logits * self.architecture.logit_scale
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def _embed(self, input_ids: Tensor) -> Tensor:
        rows, scale = F.embedding(input_ids, self.embedding), self.architecture.embedding_scale
        if scale != 1:
            # Rounded to the dtype of the weights, as the models were trained.
            rows = rows * torch.tensor(scale, dtype=rows.dtype).item()
        return rows.to(self.row_dtype)


def _tapped(taps: Sequence[int], streams: Mapping[int, Tensor], last: Tensor) -> tuple[Tensor, ...]:
    return tuple(streams.get(tap, last) for tap in taps)
