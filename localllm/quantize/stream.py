"""The calibration tokens on their way through the layers, one layer at a time."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from localllm.model.inputs import ForwardBatch
from localllm.model.layers import DecoderLayer, Rotation
from localllm.model.rope import RopeTable
from localllm_kernels import Ops
from localllm_kernels.kv_cache import KVCache

# Tokens that are in a layer at once: what bounds the memory besides the layer itself.
BATCH_TOKENS = 4096
# Activations of up to so many bytes are kept, and not computed again, for the down projection.
KEPT_BYTES = 1 << 30


class CalibrationStream:
    """The residual stream of all sequences before a layer, and the parts of a step through it.

    The inputs of a layer's linears come from four iterators, in the order in which the linears
    are quantized; each computes with the layer as it is by then. The stream itself stays in host
    memory; what is in a layer is on the device.
    """

    def __init__(self, hidden: Tensor, rope: RopeTable, ops: Ops) -> None:
        """`hidden`: [num_seqs, length, hidden] in host memory; it is changed in place."""
        self._hidden, self._rope, self._ops = hidden, rope, ops
        self._attended = torch.empty(0)
        self._activated: list[Tensor] = []
        self._seqs = max(1, BATCH_TOKENS // hidden.shape[1])
        self._device = rope.cos.device

    def copy(self) -> "CalibrationStream":
        """A stream at the same place, which goes on by itself."""
        return CalibrationStream(self._hidden.clone(), self._rope, self._ops)

    def rows(self) -> Iterator[Tensor]:
        """The stream as it stands, [num_tokens, hidden] at a time on the device."""
        for part in self._parts():
            yield part.to(self._device).flatten(0, 1)

    def attention_inputs(self, layer: DecoderLayer) -> Iterator[Tensor]:
        """Inputs of query, key and value projection, [num_tokens, hidden] at a time."""
        norm = layer.input_norm
        for hidden in self.rows():
            yield self._ops.rms_norm(hidden, norm.weight, norm.eps)

    def attended(self, layer: DecoderLayer) -> Iterator[Tensor]:
        """Inputs of the output projection, [num_tokens, heads · head_dim] at a time."""
        attended = []
        for x in self.attention_inputs(layer):
            batch, cache = self._attention_batch(x, layer)
            rotation = Rotation(self._rope.cos[batch.positions], self._rope.sin[batch.positions])
            out = layer.attention.attend(x, rotation, batch, cache, self._ops)
            attended.append(out.to(self._hidden.device))
            yield out
        self._attended = torch.cat(attended)

    def divide_attended(self, divisors: Tensor) -> None:
        """Follow a change of the value projection that came after `attended`."""
        self._attended /= divisors.to(self._attended)

    def add_attention(self, layer: DecoderLayer) -> None:
        """Add the output projection to the stream."""
        start = 0
        for part in self._parts():
            end = start + part.shape[0] * part.shape[1]
            attended = self._attended[start:end].to(self._device)
            part += layer.attention.o_proj(attended).view_as(part).to(part.device)
            start = end
        self._attended = torch.empty(0)

    def mlp_inputs(self, layer: DecoderLayer) -> Iterator[Tensor]:
        """Inputs of gate and up projection, [num_tokens, hidden] at a time."""
        norm = layer.post_attention_norm
        for hidden in self.rows():
            yield self._ops.rms_norm(hidden, norm.weight, norm.eps)

    def activations(self, layer: DecoderLayer) -> Iterator[Tensor]:
        """Inputs of the down projection, [num_tokens, intermediate] at a time."""
        self._activated = []
        for x in self.mlp_inputs(layer):
            activated = layer.mlp.activate(x, self._ops)
            if self._hidden.shape[0] * self._hidden.shape[1] * activated[0].nbytes <= KEPT_BYTES:
                self._activated.append(activated.to(self._hidden.device))
            yield activated

    def add_mlp(self, layer: DecoderLayer) -> None:
        """Add the feed-forward to the stream, which then stands before the next layer. Gate and up
        projection are those of the last `activations`, if there were any.
        """
        kept, self._activated = self._activated, []
        activations: Iterable[Tensor] = kept or self.activations(layer)
        for part, inner in zip(self._parts(), activations, strict=True):
            part += layer.mlp.down_proj(inner.to(self._device)).view_as(part).to(part.device)
        self._activated = []

    def pass_through(self, layer: DecoderLayer) -> None:
        """The whole layer."""
        self._activated = []
        for _ in self.attended(layer):
            pass
        self.add_attention(layer)
        self.add_mlp(layer)

    def _parts(self) -> tuple[Tensor, ...]:
        return torch.split(self._hidden, self._seqs)

    def _attention_batch(self, x: Tensor, layer: DecoderLayer) -> tuple[ForwardBatch, KVCache]:
        """A batch of whole sequences, each in one block of its own behind the null block."""
        device, length = self._device, self._hidden.shape[1]
        num_tokens = len(x)
        num_seqs = num_tokens // length
        attention = layer.attention
        shape = (num_seqs + 1, attention.num_kv_heads, length, attention.head_dim)
        key, value = (torch.zeros(shape, dtype=x.dtype, device=device) for _ in range(2))
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        batch = ForwardBatch(
            input_ids=nothing,
            positions=torch.arange(length, device=device).repeat(num_seqs),
            slot_mapping=torch.arange(length, length + num_tokens, device=device),
            block_tables=torch.arange(1, num_seqs + 1, dtype=torch.int32, device=device)[:, None],
            cu_seqlens_q=torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=device),
            seq_lens=torch.full((num_seqs,), length, device=device),
            max_query_len=length,
            logit_rows=nothing,
            num_logit_rows=0,
        )
        return batch, KVCache(key, value)
