"""The decoder: embedding, layers, final norm, head. One class for every architecture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm.model.blocks.block import BlockInputs
from localllm.model.fused.decoder import FusedDecoder
from localllm.model.inputs import ForwardBatch, PagedKVCache
from localllm.model.layer import Layer
from localllm.model.linear import Projection
from localllm.model.norm import RMSNorm
from localllm.model.rope import RopeTables
from localllm_kernels import Ops


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """A loaded model; holds weights and no state of any request."""

    architecture: Architecture
    embedding: Tensor  # [vocab_size, hidden]
    layers: tuple[Layer, ...]
    norm: RMSNorm
    lm_head: Projection
    ropes: RopeTables
    ops: Ops
    # The layers and the last norm in one call, where there is one for them.
    fused: FusedDecoder | None = None

    def forward(self, batch: ForwardBatch, kv_cache: PagedKVCache) -> Tensor:
        """Hidden states [padded_tokens, hidden] of the batch's tokens, after the final norm.

        Writes the new tokens' keys and values to `kv_cache`.
        """
        return self.forward_tapped(batch, kv_cache, ())[0]

    def forward_tapped(
        self, batch: ForwardBatch, kv_cache: PagedKVCache, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The same, and of each layer in `taps` the residual stream behind it, [padded_tokens,
        hidden]; the number of layers stands for what comes behind the final norm.
        """
        ops = self.ops
        rotations = self.ropes.rotations(batch.positions)
        residual = F.embedding(batch.input_ids, self.embedding).to(self.norm.weight.dtype)
        if self.fused is not None and self.fused.takes(batch):
            [rotation] = rotations.values()
            x, found = self.fused(residual, rotation, batch, kv_cache, taps)
            return x, _tapped(taps, found, x)
        first, *others = [sublayer.norm for layer in self.layers for sublayer in layer.sublayers]
        x = ops.rms_norm(residual, first.weight, first.eps)
        # Each block hands over its output normed for the next one, with the residual beside it.
        next_norms = iter([*others, self.norm])
        streams: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            place = kv_cache.places[i]
            tables = None if place is None else batch.tables[place[0]]
            inputs = BlockInputs(ops, batch, rotations, kv_cache.layer(i), tables)
            for sublayer in layer.sublayers:
                x, norm = sublayer.block(x, inputs), next(next_norms)
                x, residual = ops.add_rms_norm(x, residual, norm.weight, norm.eps)
            if i in taps:
                streams[i] = residual
        return x, _tapped(taps, streams, x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden`: [rows, hidden] -> float32 [rows, vocab_size]."""
        return self.lm_head(hidden).float()


def _tapped(taps: Sequence[int], streams: Mapping[int, Tensor], last: Tensor) -> tuple[Tensor, ...]:
    return tuple(streams.get(tap, last) for tap in taps)
