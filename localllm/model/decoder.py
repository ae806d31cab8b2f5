"""The decoder: embedding, layers, final norm, head. One class for every architecture."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm.model.blocks.block import BlockInputs
from localllm.model.ends import ClusteredHead, Embedding, Head
from localllm.model.fused.cpu_head import CpuHead
from localllm.model.fused.decoder import FusedDecoder
from localllm.model.inputs import ForwardBatch
from localllm.model.join import Join
from localllm.model.layer import Layer
from localllm.model.norm import Norm
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.model.per_layer_inputs import PerLayerInputs
from localllm.model.rope import RopeTables
from localllm_kernels import Ops


@dataclass(frozen=True, slots=True)
class DecoderModel:
    """A loaded model; holds weights and no state of any request."""

    architecture: Architecture
    embedding: Embedding
    layers: tuple[Layer, ...]
    norm: Norm | None
    head: Head | ClusteredHead
    ropes: RopeTables
    ops: Ops
    per_layer: PerLayerInputs | None = None
    # Of a head that drafts for another model.
    join: Join | None = None
    # Its drafts in one call, if that is supported.
    fused_drafts: CpuHead | None = None
    # The head that scores texts, [num_labels, hidden], where there is one.
    labels: Tensor | None = None
    # The layers and the final norm in one call, if that is supported for them.
    fused: FusedDecoder | None = None
    # See `Architecture.last_state`, which takes a while to find.
    num_whole: int = 0
    # Whether the host looks at values in a step, as it does for experts in its memory.
    looks: bool = False

    @property
    def hidden_inputs(self) -> tuple[int, torch.dtype] | None:
        """Width and dtype of the hidden states that a head takes; None for other models."""
        if self.join is None:
            return None
        spec, width = self.architecture.join, self.architecture.hidden_size
        assert spec is not None
        return spec.state_width(width), self.embedding.row_dtype

    def forward(self, batch: ForwardBatch, kv_cache: PagedKVCache) -> Tensor:
        """Hidden states [padded_tokens, hidden] of the batch's tokens, after the final norm, which
        a head may lack.

        Writes the new tokens' keys and values to `kv_cache`.
        """
        return self.forward_tapped(batch, kv_cache, ())[0]

    def forward_tapped(
        self, batch: ForwardBatch, kv_cache: PagedKVCache, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Like `forward`, and also the residual stream after each layer in `taps`, [padded_tokens,
        hidden]. A tap equal to the number of layers means the output of the final norm, or what
        the linear behind it gives, of a head that has one, see JoinSpec.
        """
        return self._forward(batch, kv_cache, taps, len(self.layers))

    def forward_last(
        self, batch: ForwardBatch, kv_cache: PagedKVCache, taps: Sequence[int]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Like `forward_tapped`, but hidden states [padded_rows, hidden] of the rows `logit_rows`
        alone, which are the last ones of their requests. Without taps, layers after the last one
        that keeps state compute only these rows.
        """
        num_whole = self.num_whole
        wants_all = batch.num_logit_rows == batch.num_tokens
        if taps or wants_all or num_whole == len(self.layers):
            hidden, tapped = self.forward_tapped(batch, kv_cache, taps)
            return hidden if wants_all else hidden[batch.logit_rows], tapped
        return self._forward(batch, kv_cache, taps, num_whole)

    def _forward(
        self, batch: ForwardBatch, kv_cache: PagedKVCache, taps: Sequence[int], num_whole: int
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`num_whole`: the number of layers that compute all rows."""
        ops = self.ops
        rotations = self.ropes.rotations(batch.positions)
        residual, joined = self.embedding(batch.input_ids), None
        if self.join is not None:
            assert batch.hidden is not None
            residual, joined = self.join(residual, batch.hidden, ops)
        if self.fused is not None and self.fused.takes(batch):
            x, found = self.fused(residual, rotations, batch, kv_cache, taps)
            return x, _tapped(taps, found, x)
        per_layer = None if self.per_layer is None else self.per_layer(batch.input_ids, residual)
        # Each block's output is added to the residual and normed for the next block.
        norms = [sublayer.norm for layer in self.layers for sublayer in layer.sublayers]
        x = residual if joined is None else joined
        if norms[0] is not None:
            x = norms[0](x, ops)
        next_norms = iter([*norms[1:], self.norm])
        streams: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers):
            if i == num_whole:
                if batch.num_logit_rows == 0:
                    return residual[:0], ()
                rows, batch = batch.logit_rows, batch.of_logit_rows()
                x, residual = x[rows], residual[rows]
                rotations = self.ropes.rotations(batch.positions)
                per_layer = None if per_layer is None else per_layer[:, rows]
            own_input = None if per_layer is None else per_layer[i]
            inputs = BlockInputs(
                ops,
                batch,
                rotations,
                kv_cache.layer(i),
                kv_cache.tables(i, batch.tables),
                own_input,
                kv_cache.recurrent.get(i),
            )
            for sublayer in layer.sublayers:
                output, norm = sublayer.output(x, inputs), next(next_norms)
                is_plain_sum = sublayer.factor == 1 and not sublayer.place.shares_input
                if norm is not None and is_plain_sum:
                    x, residual = norm.after_sum(output, residual, ops)
                    continue
                residual = residual + output
                if sublayer.factor != 1:
                    residual = residual * sublayer.factor
                if not sublayer.place.shares_input:
                    x = residual if norm is None else norm(residual, ops)
            if i in taps:
                streams[i] = residual
        back = None if self.join is None else self.join.back
        return x, _tapped(taps, streams, x if back is None or not taps else back(x))

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`hidden`: [rows, hidden] -> float32 [rows, vocab_size]."""
        return self.head(hidden)

    def compute_scores(self, hidden: Tensor) -> Tensor:
        """`hidden`: [rows, hidden] -> float32 [rows, num_labels], of a model that scores texts."""
        assert self.labels is not None
        return hidden.float() @ self.labels.float().t()


def _tapped(taps: Sequence[int], streams: Mapping[int, Tensor], last: Tensor) -> tuple[Tensor, ...]:
    return tuple(streams.get(tap, last) for tap in taps)
