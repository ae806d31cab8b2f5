"""How a model's keys become codes of 4 bits, see four_bits.py, found by running the model."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from localllm.model.architecture import SlotSizes
from localllm.model.decoder import DecoderModel
from localllm.model.inputs import ForwardBatch, GroupTables
from localllm.model.key_means import NUM_WINDOWS, WINDOW, window_positions
from localllm.model.paged_kv_cache import PagedKVCache
from localllm_kernels.attention.four_bits import NUM_MEANS, KeyCoding, key_factors
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.recurrence.state_cache import StateSlots

_BLOCK_SIZE = 16
_SEED = 0
# Rounds in which means move to the middle of what is nearest to them: with 3 `pocket` would lose
# 5 % more, with 60 as much.
_ROUNDS = 20


@torch.inference_mode()
def find_codings(model: DecoderModel) -> tuple[KeyCoding, ...]:
    """The codings of each cache group, whose tensors have the group's layers as their first
    dimension: from the keys and queries of text that the model writes.
    """
    model = replace(model, architecture=replace(model.architecture, own_keys=0))
    groups = model.architecture.cache_groups
    kv_cache = PagedKVCache.allocate(
        model.architecture,
        [1 + NUM_WINDOWS * WINDOW // _BLOCK_SIZE] * len(groups),
        _BLOCK_SIZE,
        model.embedding.row_dtype,
        model.embedding.device,
        SlotSizes(NUM_WINDOWS),
    )
    ids = _written(model, kv_cache)
    starts_of_texts = [_keys(stack)[:, :, ::WINDOW].clone() for stack in kv_cache.stacks]
    seen = _Queries()
    listening = replace(
        model, fused=None, ops=replace(model.ops, paged_attention=seen.listen(model))
    )
    # Keys turn with their positions, and their means with the keys.
    positions = window_positions(model.ropes.num_positions)
    listening.forward(_batch(ids, positions, 0, len(groups)), kv_cache)
    return tuple(
        _coding(
            firsts,
            _keys(stack),
            torch.stack([seen.moments[each.data_ptr()] for each in stack.key]),
            NUM_MEANS if not stack.values_are_keys else 1,
        )
        for firsts, stack in zip(starts_of_texts, kv_cache.stacks, strict=True)
    )


def plain_codings(model: DecoderModel) -> tuple[KeyCoding, ...]:
    """Those of a head that drafts, whose keys nothing is known of."""
    return tuple(
        KeyCoding.plain(
            (len(group.layers), group.state.num_heads, group.state.width), model.embedding.device
        )
        for group in model.architecture.cache_groups
        if group.coded is None
    )


def _written(model: DecoderModel, kv_cache: PagedKVCache) -> Tensor:
    """Token ids that the model draws, one after another, whose keys are in the cache: int64
    [NUM_WINDOWS, WINDOW]; random ones of a model that writes no text.
    """
    architecture, device = model.architecture, model.embedding.device
    generator = torch.Generator().manual_seed(_SEED)
    vocab, count = architecture.vocab_size, 2 if architecture.writes_text else WINDOW
    ids = torch.randint(vocab, (NUM_WINDOWS, count), generator=generator)
    # A model that texts have begun with one token says nothing sensible without it.
    for start in architecture.start_token_ids[:1]:
        ids[:, 0] = min(start, vocab - 1)
    positions = torch.arange(WINDOW).clamp(max=model.ropes.num_positions - 1)
    known = 0
    while True:
        at = positions[known : ids.shape[1]].expand(NUM_WINDOWS, -1)
        batch = _batch(ids[:, known:].to(device), at, known, len(kv_cache.stacks))
        hidden = model.forward(batch, kv_cache)
        known = ids.shape[1]
        if known == WINDOW:
            return ids.to(device)
        last = hidden.view(NUM_WINDOWS, -1, hidden.shape[-1])[:, -1].contiguous()
        chances = model.compute_logits(last).cpu().softmax(-1)
        ids = torch.cat((ids, torch.multinomial(chances, 1, generator=generator)), dim=1)


def _batch(ids: Tensor, positions: Tensor, known: int, num_groups: int) -> ForwardBatch:
    """Tokens of all windows, [NUM_WINDOWS, count], at those positions, behind `known` tokens."""
    (windows, count), device = ids.shape, ids.device
    blocks = torch.arange(windows * WINDOW // _BLOCK_SIZE, dtype=torch.int32, device=device) + 1
    within = torch.arange(known, known + count, device=device)
    slots = torch.arange(windows, device=device)[:, None] * WINDOW + within + _BLOCK_SIZE
    tables = GroupTables(slots.flatten(), blocks.view(windows, -1))
    edges = tuple(range(0, windows * count + 1, count))
    before, after = (known,) * windows, (known + count,) * windows
    return ForwardBatch(
        input_ids=ids.flatten(),
        positions=positions.flatten().to(device),
        tables=(tables,) * num_groups,
        cu_seqlens_q=torch.tensor(edges, dtype=torch.int32, device=device),
        seq_lens=torch.full((windows,), known + count, device=device),
        max_query_len=count,
        logit_rows=torch.empty(0, dtype=torch.int64, device=device),
        num_logit_rows=0,
        states=StateSlots(tuple(range(windows)), edges, before, before, after),
    )


def _keys(stack: KVCache) -> Tensor:
    """float32 [layers, kv_heads, tokens, head_dim], of all windows one after another."""
    return stack.key[:, 1:].transpose(1, 2).flatten(2, 3).float()


def _coding(firsts: Tensor, keys: Tensor, queries: Tensor, count: int) -> KeyCoding:
    """For keys of first tokens and of others, [layers, kv_heads, tokens, head_dim], with `count`
    means, and for queries with these second moments, [layers, kv_heads, head_dim, head_dim].
    """
    factors = key_factors(keys.var(2, correction=0), queries)
    layers, heads, width = factors.shape
    scaled = [(each * factors[:, :, None]).flatten(0, 1) for each in (firsts, keys)]
    means, spreads = _means(scaled[0], scaled[1], count)
    means = means.expand(-1, NUM_MEANS, -1).view(layers, heads, NUM_MEANS, width)
    means, spreads = means / factors[:, :, None], spreads.view(factors.shape) / factors.square()
    parts = [KeyCoding.fitted(*each) for each in zip(means, spreads, queries, strict=True)]
    return KeyCoding(
        torch.stack([part.means for part in parts]),
        torch.stack([part.factors for part in parts]),
        torch.stack([part.feedback for part in parts]),
    )


def _means(firsts: Tensor, others: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """`count` means of rows [heads, tokens, width], [heads, count, width], and the variances of
    rows about the nearest, [heads, width] (Lloyd 1982, "Least squares quantization in PCM").
    """
    generator = torch.Generator().manual_seed(_SEED)
    rows = torch.cat((firsts, others), dim=1)
    means = torch.cat([each.mean(1, keepdim=True) for each in (rows, firsts)], dim=1)[:, :count]
    while means.shape[1] < count:
        # Rows that are far from all means are likelier to be the next (k-means++).
        away = torch.cdist(rows, means).amin(2).square() + torch.finfo(torch.float32).tiny
        place = torch.multinomial(away.cpu(), 1, generator=generator).to(rows.device)
        means = torch.cat((means, rows.take_along_dim(place[:, :, None], dim=1)), dim=1)
    for _ in range(_ROUNDS):
        nearest = torch.nn.functional.one_hot(torch.cdist(rows, means).argmin(2), count)
        members = nearest.transpose(1, 2).to(rows.dtype)
        sizes = members.sum(2, keepdim=True)
        means = torch.where(sizes > 0, members @ rows / sizes.clamp(min=1), means)
    nearest = torch.cdist(rows, means).argmin(2)
    away = rows - means.take_along_dim(nearest[:, :, None], dim=1)
    return means, away.square().mean(1)


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
