"""The calibration tokens on their way through the layers, one layer at a time."""

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm.model.blocks.block import BlockInputs, BlockSpec
from localllm.model.blocks.latent_attention import LatentAttention
from localllm.model.inputs import ForwardBatch, GroupTables
from localllm.model.layer import Layer, Sublayer
from localllm.model.norm import Norm
from localllm.model.rope import RopeTables
from localllm.model.weights import WeightReader
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.recurrence.state_cache import StateCache, StateSlots

# Tokens that are in a layer at once; they bound the memory besides the layer itself.
BATCH_TOKENS = 4096
# Inputs of a block's last product are kept, and not computed again, up to so many bytes; those of
# attention are always kept.
KEPT_BYTES = 1 << 30


class CalibrationStream:
    """The residual stream of all sequences before a block, and the steps through that block.

    The inputs of a block's products come from two iterators, in the order in which the products
    are quantized; each computes with the block in its state at that time. The stream itself stays
    in host memory; what is in a block is on the device.
    """

    def __init__(
        self,
        hidden: Tensor,
        ropes: RopeTables,
        ops: Ops,
        *,
        per_layer: Tensor | None = None,
        sources: frozenset[int] = frozenset(),
    ) -> None:
        """`hidden`: [num_seqs, length, hidden] in host memory; it is changed in place. `per_layer`:
        the layers' own inputs, [num_layers, num_seqs, length, width]; `sources`: the layers whose
        keys and values later ones read.
        """
        self._hidden, self.ropes, self.ops = hidden, ropes, ops
        self._per_layer, self._sources = per_layer, sources
        self._layer = 0
        # By layer, for each part of the sequences; in host memory.
        self._caches: dict[int, list[KVCache]] = {}
        # The stream before a block whose input the next one shares.
        self._shared: Tensor | None = None
        self._shared_norm: Norm | None = None
        self._kept: list[Tensor] = []
        self._seqs = max(1, BATCH_TOKENS // hidden.shape[1])
        self._device = ropes.device

    @classmethod
    def begin(
        cls,
        reader: WeightReader,
        architecture: Architecture,
        windows: Tensor,
        ropes: RopeTables,
        ops: Ops,
    ) -> "CalibrationStream":
        """The stream before the first layer; `windows`: the tokens, int64 [num_seqs, length]."""
        embedding, length = reader.embedding(architecture), windows.shape[1]
        own_inputs = reader.per_layer_inputs(architecture, TORCH_OPS)
        hidden, per_layer = [], []
        parts = torch.split(windows.to(embedding.device), max(1, BATCH_TOKENS // length))
        for tokens in parts:
            rows = embedding(tokens.flatten())
            hidden.append(rows.view(*tokens.shape, -1).cpu())
            if own_inputs is not None:
                found = own_inputs(tokens.flatten(), rows)
                per_layer.append(found.view(len(found), *tokens.shape, -1).cpu())
        return cls(
            torch.cat(hidden),
            ropes,
            ops,
            per_layer=torch.cat(per_layer, dim=1) if per_layer else None,
            sources=frozenset(plan.reads for plan in architecture.layers if plan.reads is not None),
        )

    def copy(self) -> "CalibrationStream":
        """An independent stream at the same place."""
        copied = CalibrationStream(
            self._hidden.clone(),
            self.ropes,
            self.ops,
            per_layer=self._per_layer,
            sources=self._sources,
        )
        copied._layer, copied._caches = self._layer, dict(self._caches)
        return copied

    def enter(self, layer: int) -> None:
        """Say which layer the next blocks belong to."""
        self._layer = layer

    def rows(self) -> Iterator[Tensor]:
        """The stream at its current place, [num_tokens, hidden] at a time, on the device."""
        for part in self._parts(self._hidden):
            yield part.to(self._device).flatten(0, 1)

    def inputs(self, sublayer: Sublayer) -> Iterator[Tensor]:
        """Inputs of a block, [num_tokens, hidden] at a time."""
        norm = sublayer.norm if self._shared is None else self._shared_norm
        for part in self._parts(self._hidden if self._shared is None else self._shared):
            hidden = part.to(self._device).flatten(0, 1)
            yield hidden if norm is None else norm(hidden, self.ops)

    def rows_at(self, tokens: Tensor) -> Tensor:
        """The stream's rows of `tokens`, int64 on the host: [len(tokens), hidden] on the device."""
        return self._hidden.flatten(0, 1)[tokens].to(self._device)

    def inner(self, sublayer: Sublayer) -> Iterator[Tensor]:
        """Inputs of a block's last product, [num_tokens, width] at a time."""
        self._kept = []
        block = sublayer.place.block
        caches: list[KVCache] = []
        if block.state is not None and self._layer in self._sources:
            self._caches[self._layer] = caches
        for i, x in enumerate(self.inputs(sublayer)):
            inputs = self._block_inputs(x, i, block)
            inner = sublayer.block.inner(x, inputs)
            if inputs.cache is not None and self._layer in self._sources:
                caches.append(_moved(inputs.cache, self._hidden.device))
            num_tokens = self._hidden.shape[0] * self._hidden.shape[1]
            is_attention = inputs.cache is not None
            if is_attention or num_tokens * inner[0].nbytes <= KEPT_BYTES:
                self._kept.append(inner.to(self._hidden.device))
            yield inner

    def between(self, sublayer: Sublayer) -> Iterator[Tensor]:
        """Inputs of the product in a block's middle, [num_tokens, width] at a time."""
        assert isinstance(sublayer.block, LatentAttention)
        for x in self.inputs(sublayer):
            yield sublayer.block.query_inputs(x, self.ops)

    def divide_inner(self, divisors: Tensor) -> None:
        """Divide the kept inputs, after a change of the weights that produced them."""
        for kept in self._kept:
            kept /= divisors.to(kept)

    def add(self, sublayer: Sublayer) -> None:
        """Add a block to the stream, with the inputs of the last `inner` if they were kept."""
        before = self._hidden.clone() if sublayer.place.shares_input else None
        for part, output in zip(self._parts(self._hidden), self._outputs(sublayer), strict=True):
            added = sublayer.finish(output, self.ops)
            part += added.view_as(part).to(part.device)
            part *= sublayer.factor
        self._kept = []
        self._shared, self._shared_norm = before, sublayer.norm

    def _outputs(self, sublayer: Sublayer) -> Iterator[Tensor]:
        kept, self._kept = self._kept, []
        block, spec = sublayer.block, sublayer.place.block
        if not spec.ends_in_product:
            for i, x in enumerate(self.inputs(sublayer)):
                yield block(x, self._block_inputs(x, i, spec))
            return
        inner: Iterable[Tensor] = kept or self.inner(sublayer)
        for values in inner:
            yield block.products[-1](values.to(self._device))

    def pass_through(self, layer: Layer) -> None:
        """Add a whole layer to the stream."""
        self._kept = []
        for sublayer in layer.sublayers:
            self.add(sublayer)

    def _parts(self, hidden: Tensor) -> tuple[Tensor, ...]:
        return torch.split(hidden, self._seqs)

    def _block_inputs(self, x: Tensor, part: int, block: BlockSpec) -> BlockInputs:
        """Inputs for whole sequences, each in one block of the cache after the null block."""
        device, length = self._device, self._hidden.shape[1]
        num_tokens = len(x)
        num_seqs = num_tokens // length
        cache, state = None, block.state
        if block.reads is not None:
            cache = _moved(self._caches[block.reads][part], device)
        if state is not None:
            shape = (num_seqs + 1, state.num_heads, length, state.width)
            key = torch.zeros(shape, dtype=x.dtype, device=device)
            cache = KVCache(key, torch.zeros_like(key))
        recurrent = None
        if block.recurrence is not None:
            kept = block.recurrence
            rows = torch.zeros((num_seqs, kept.num_rows, kept.width), device=device)
            matrix = None
            if kept.matrix is not None:
                matrix = torch.zeros((num_seqs, *kept.matrix), device=device)
            recurrent = StateCache(rows, kept.num_rows, matrix)
        nothing = torch.empty(0, dtype=torch.int64, device=device)
        batch = ForwardBatch(
            input_ids=nothing,
            positions=torch.arange(length, device=device).repeat(num_seqs),
            tables=(),
            cu_seqlens_q=torch.arange(0, num_tokens + 1, length, dtype=torch.int32, device=device),
            seq_lens=torch.full((num_seqs,), length, device=device),
            max_query_len=length,
            logit_rows=nothing,
            num_logit_rows=0,
            states=StateSlots(
                tuple(range(num_seqs)),
                tuple(range(0, num_tokens + 1, length)),
                (0,) * num_seqs,
                (0,) * num_seqs,
                (length,) * num_seqs,
            ),
        )
        tables = GroupTables(
            torch.arange(length, length + num_tokens, device=device),
            torch.arange(1, num_seqs + 1, dtype=torch.int32, device=device)[:, None],
        )
        rotations = self.ropes.rotations(batch.positions)
        per_layer = None
        if self._per_layer is not None:
            per_layer = self._parts(self._per_layer[self._layer])[part].flatten(0, 1).to(device)
        return BlockInputs(self.ops, batch, rotations, cache, tables, per_layer, recurrent)


def _moved(cache: KVCache, device: torch.device) -> KVCache:
    return KVCache(cache.key.to(device), cache.value.to(device))
