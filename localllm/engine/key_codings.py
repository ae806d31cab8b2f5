"""How a model's keys become codes of 4 bits, see four_bits.py, found by running the model."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from localllm.model.architecture import SlotSizes
from localllm.model.decoder import DecoderModel
from localllm.model.inputs import ForwardBatch, GroupTables
from localllm.model.paged_kv_cache import PagedKVCache
from localllm_kernels.attention.four_bits import KeyCoding
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.recurrence.state_cache import StateSlots

_WINDOWS, _LENGTH, _BLOCK_SIZE = 8, 128, 16
# Positions that the windows are spread over: keys turn with them, and their means with the keys.
_MOST_POSITIONS = 8192
_SEED = 0


@torch.inference_mode()
def find_codings(model: DecoderModel) -> tuple[KeyCoding, ...]:
    """The codings of each cache group, whose tensors have the group's layers as their first
    dimension: from the keys and queries of random tokens.
    """
    device = model.embedding.device
    groups = model.architecture.cache_groups
    kv_cache = PagedKVCache.allocate(
        model.architecture,
        [1 + _LENGTH // _BLOCK_SIZE] * len(groups),
        _BLOCK_SIZE,
        model.embedding.row_dtype,
        device,
        SlotSizes(1),
    )
    seen = _Queries()
    listening = replace(
        model, fused=None, ops=replace(model.ops, paged_attention=seen.listen(model))
    )
    sums = [_Sums() for _ in groups]
    generator = torch.Generator().manual_seed(_SEED)
    span = min(model.ropes.num_positions, _MOST_POSITIONS) - _LENGTH
    for window in range(_WINDOWS):
        ids = torch.randint(model.architecture.vocab_size, (_LENGTH,), generator=generator)
        first = max(0, span) * window // (_WINDOWS - 1)
        listening.forward(_batch(ids.to(device), first, len(groups)), kv_cache)
        for group, stack in zip(sums, kv_cache.stacks, strict=True):
            group.add(stack.key[:, 1:].transpose(2, 3).flatten(1, 2).transpose(1, 2).double())
    return tuple(
        group.coding(torch.stack([seen.moments[each.data_ptr()] for each in stack.key]))
        for group, stack in zip(sums, kv_cache.stacks, strict=True)
    )


def plain_codings(model: DecoderModel) -> tuple[KeyCoding, ...]:
    """Those of a head that drafts, whose keys nothing is known of."""
    return tuple(
        KeyCoding.plain(
            (len(group.layers), group.state.num_heads, group.state.width), model.embedding.device
        )
        for group in model.architecture.cache_groups
    )


def _batch(ids: Tensor, first: int, num_groups: int) -> ForwardBatch:
    """One request, at positions from `first` on."""
    count, device = len(ids), ids.device
    slots = torch.arange(count, device=device) + _BLOCK_SIZE
    table = torch.arange(1, 1 + count // _BLOCK_SIZE, dtype=torch.int32, device=device)
    return ForwardBatch(
        input_ids=ids,
        positions=torch.arange(first, first + count, device=device),
        tables=(GroupTables(slots, table[None, :]),) * num_groups,
        cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device=device),
        seq_lens=torch.tensor([count], device=device),
        max_query_len=count,
        logit_rows=torch.empty(0, dtype=torch.int64, device=device),
        num_logit_rows=0,
        states=StateSlots((0,), (0, count), (0,), (0,), (count,)),
    )


@dataclass(slots=True)
class _Sums:
    """Of the keys of a group's layers: [layers, kv_heads, head_dim]."""

    count: int = 0
    total: Tensor | float = 0.0
    squares: Tensor | float = 0.0

    def add(self, keys: Tensor) -> None:
        """`keys`: [layers, kv_heads, tokens, head_dim]."""
        self.count += keys.shape[2]
        self.total = self.total + keys.sum(2)
        self.squares = self.squares + keys.square().sum(2)

    def coding(self, queries: Tensor) -> KeyCoding:
        """With the queries' second moments, [layers, kv_heads, head_dim, head_dim]."""
        means = torch.as_tensor(self.total / self.count)
        spreads = (self.squares / self.count - means.square()).clamp(min=0)
        parts = [KeyCoding.fitted(*each) for each in zip(means, spreads, queries, strict=True)]
        return KeyCoding(
            torch.stack([part.means for part in parts]),
            torch.stack([part.factors for part in parts]),
            torch.stack([part.feedback for part in parts]),
        )


@dataclass(slots=True)
class _Queries:
    """Sums of the queries' second moments, by the address of the keys that they met."""

    moments: dict[int, Tensor] = field(default_factory=dict)

    def listen(self, model: DecoderModel) -> Any:
        """The model's attention, which is also listened to."""

        def attention(query: Tensor, cache: KVCache, **how: Any) -> Tensor:
            kv_heads, at = cache.key.shape[1], cache.key.data_ptr()
            by_key = query.view(len(query), kv_heads, -1, query.shape[-1]).transpose(0, 1)
            rows = by_key.flatten(1, 2).double()
            self.moments[at] = self.moments.get(at, 0) + rows.transpose(1, 2) @ rows
            return model.ops.paged_attention(query, cache, **how)

        return attention
