"""Requests of many lengths over one paged cache, for the tests of attention."""

from collections.abc import Callable
from dataclasses import replace

import torch

from localllm_kernels.attention.four_bits import FOUR_BITS, NUM_MEANS, OWN_KEYS, KeyCoding
from localllm_kernels.attention.kv_cache import CODE_LIMITS, KVCache, coded_rows, plain_rows
from localllm_kernels.attention.paged_attention import (
    KEY_TILE,
    QUERY_TILE,
    paged_attention_reference,
)

Attention = Callable[..., torch.Tensor]
BLOCK_SIZE = 16
HEAD_DIM = 24
# Keys of a request, and how many of them are new.
MIXED = [(1, 1), (5, 5), (130, 1), (300, 70), (16, 1), (257, 1), (KEY_TILE, QUERY_TILE), (129, 2)]


def drawn_coding(kv_heads: int, head_dim: int, *, values_are_keys: bool = False) -> KeyCoding:
    """Of keys in 4 bits, as if found for a model; keys that are values have one mean."""
    generator = torch.Generator().manual_seed(head_dim)
    shape = kv_heads, NUM_MEANS, head_dim
    means = 2 * torch.randn(*shape, generator=generator)
    if values_are_keys:
        means = means[:, :1].expand(shape).contiguous()
    queries = torch.randn(kv_heads, 4 * head_dim, head_dim, generator=generator)
    spreads = 0.5 + torch.rand(kv_heads, head_dim, generator=generator)
    return KeyCoding.fitted(means, spreads, queries.transpose(1, 2) @ queries)


def _kept(cache: KVCache, codes: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
    if scales is None:
        return codes.double()
    return plain_rows(codes, scales, cache.coding, are_keys=codes is cache.key).double()


def turned(cache: KVCache) -> KVCache:
    """The inverse of `KVCache.rows`."""
    *outer, size, width = cache.key.shape
    key, value = cache.key.transpose(-1, -2), cache.value
    if cache.key.dtype != torch.float32:
        key = cache.key.view(*outer, size, width // 2, 2).transpose(-2, -3)
        value = value.view(*outer, size // 2, 2, width).transpose(-1, -2)
    key, value = (part.contiguous().view(cache.key.shape) for part in (key, value))
    return replace(cache, key=key, value=value, is_turned=True)


class Batch:
    """Random requests in a cache whose other slots hold NaN, attended with `scale`. With a
    `value_dim`, values are the keys' first numbers, from the same memory. `is_turned`: the cache;
    `has_own`: beside codes of 4 bits, queries' own keys are there as they are.
    """

    is_turned = False
    has_own = False

    def __init__(
        self,
        lengths: list[tuple[int, int]],
        heads: int,
        kv_heads: int,
        head_dim: int = HEAD_DIM,
        kv_dtype: torch.dtype = torch.float32,
        value_dim: int | None = None,
        scale: float = 0.3,
    ) -> None:
        self.kv_dtype, self.value_dim, self.scale = kv_dtype, value_dim, scale
        generator = torch.Generator().manual_seed(sum(length for length, _ in lengths))
        blocks = [-(-length // BLOCK_SIZE) for length, _ in lengths]
        order = (torch.randperm(sum(blocks), generator=generator) + 1).tolist()
        shape = (sum(blocks) + 1, kv_heads, BLOCK_SIZE, head_dim)
        self.key_cache, self.value_cache = (
            torch.full(shape, torch.nan),
            torch.full(shape, torch.nan),
        )
        self.key_cache[0], self.value_cache[0] = 0, 0
        self.block_tables = torch.zeros(len(lengths), max(blocks), dtype=torch.int32)
        self.keys, self.values, queries = [], [], []
        for i, (length, num_queries) in enumerate(lengths):
            key = torch.randn(length, kv_heads, head_dim, generator=generator)
            value = torch.randn(length, kv_heads, head_dim, generator=generator)
            table = [order.pop() for _ in range(blocks[i])]
            self.block_tables[i, : blocks[i]] = torch.tensor(table)
            for position in range(length):
                block, slot = table[position // BLOCK_SIZE], position % BLOCK_SIZE
                self.key_cache[block, :, slot] = key[position]
                self.value_cache[block, :, slot] = value[position]
            self.keys.append(key)
            self.values.append(value)
            queries.append(torch.randn(num_queries, heads, head_dim, generator=generator))
        if value_dim is not None:
            self.value_cache, self.values = self.key_cache, self.keys
        self.query = torch.cat(queries)
        counts = torch.tensor([0] + [num_queries for _, num_queries in lengths])
        self.cu_seqlens_q = counts.cumsum(0).int()
        self.seq_lens = torch.tensor([length for length, _ in lengths])

    def to(self, device: str, dtype: torch.dtype) -> "Batch":
        """This batch there, with queries, keys and values rounded to `dtype`."""
        for name in ("query", "key_cache", "value_cache"):
            setattr(self, name, getattr(self, name).to(device, dtype))
        for name in ("block_tables", "cu_seqlens_q", "seq_lens"):
            setattr(self, name, getattr(self, name).to(device))
        return self

    @property
    def uncoded_tables(self) -> torch.Tensor | None:
        """Block tables of own keys, without the blocks that no query reads."""
        if not self.has_own:
            return None
        tables = self.block_tables.clone()
        firsts = self.seq_lens - self.cu_seqlens_q.diff().to(self.seq_lens.device)
        for table, first in zip(tables, firsts.tolist(), strict=True):
            table[: first // OWN_KEYS * OWN_KEYS // BLOCK_SIZE] = 0
        return tables

    @property
    def cache(self) -> KVCache:
        coding, are_same = None, self.value_dim is not None
        if self.kv_dtype == FOUR_BITS:
            _, kv_heads, _, head_dim = self.key_cache.shape
            coding = drawn_coding(kv_heads, head_dim, values_are_keys=are_same)
            coding = coding.to(self.key_cache.device)
        key, key_scales = self._stored(self.key_cache, coding, are_keys=True)
        uncoded = KVCache(self.key_cache, self.value_cache) if self.has_own else None
        if are_same:
            return KVCache(key, key, key_scales, key_scales, coding=coding, uncoded=uncoded)
        value, value_scales = self._stored(self.value_cache, coding, are_keys=False)
        rows = KVCache(key, value, key_scales, value_scales, coding=coding, uncoded=uncoded)
        return turned(rows) if self.is_turned else rows

    def _stored(
        self, rows: torch.Tensor, coding: KeyCoding | None, *, are_keys: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if coding is None and self.kv_dtype not in CODE_LIMITS:
            return rows.to(self.kv_dtype), None
        by_token = rows.transpose(1, 2).flatten(0, 1)
        codes, scales = coded_rows(by_token, self.kv_dtype, coding, are_keys=are_keys)
        codes, scales = (
            part.view(*rows.shape[:1], BLOCK_SIZE, *part.shape[1:]).transpose(1, 2).contiguous()
            for part in (codes, scales)
        )
        return codes, scales

    def expected(
        self,
        scale: float,
        window: int | None,
        cap: float | None = None,
        sinks: torch.Tensor | None = None,
        num_hidden: int = 0,
    ) -> torch.Tensor:
        """What attention should give, in float64, from the keys and values as they are kept."""
        cache, out = self.cache.rows, []
        starts = self.cu_seqlens_q.tolist()
        for i, length in enumerate(self.seq_lens.tolist()):
            key, value = (
                _kept(cache, codes, scales)[self.block_tables[i].long()]
                .transpose(1, 2)
                .flatten(0, 1)
                for codes, scales in (
                    (cache.key, cache.key_scales),
                    (cache.value, cache.value_scales),
                )
            )
            query = self.query[starts[i] : starts[i + 1]].double()
            group = query.shape[1] // key.shape[1]
            key, value = (x[:length].repeat_interleave(group, 1) for x in (key, value))
            scores = torch.einsum("qhd,khd->hqk", query, key) * scale
            positions = torch.arange(length - len(query), length, device=query.device)[:, None]
            keys = torch.arange(length, device=query.device)
            is_own = torch.zeros_like(keys > positions)
            if cache.uncoded is not None:
                is_own = keys // OWN_KEYS == positions // OWN_KEYS
                own_key, own_value = (
                    x[self.block_tables[i].long()].double().transpose(1, 2).flatten(0, 1)[:length]
                    for x in (cache.uncoded.key, cache.uncoded.value)
                )
                own_key, own_value = (x.repeat_interleave(group, 1) for x in (own_key, own_value))
                own = torch.einsum("qhd,khd->hqk", query, own_key) * scale
                scores = torch.where(is_own, own, scores)
            hidden = (keys > positions) | (keys < num_hidden)
            if window is not None:
                hidden |= keys <= positions - window
            if cap is not None:
                scores = cap * torch.tanh(scores / cap)
            scores = scores.masked_fill(hidden, -torch.inf)
            if sinks is not None:
                sink = sinks.double().view(-1, 1, 1).expand(-1, scores.shape[1], 1)
                scores = torch.cat((scores, sink), dim=-1)
            # A query that sees nothing gives zeros.
            weights = scores.softmax(-1).nan_to_num(0.0)[..., :length]
            found = torch.einsum("hqk,khd->qhd", weights * ~is_own, value[..., : self.value_dim])
            if cache.uncoded is not None:
                own_value = own_value[..., : self.value_dim]
                found += torch.einsum("hqk,khd->qhd", weights * is_own, own_value)
            out.append(found)
        return torch.cat(out)

    def attend(
        self, window: int | None, attention: Attention = paged_attention_reference
    ) -> torch.Tensor:
        return self.attend_part(slice(0, len(self.seq_lens)), window, attention)

    def attend_part(
        self,
        part: slice,
        window: int | None,
        attention: Attention = paged_attention_reference,
    ) -> torch.Tensor:
        starts = self.cu_seqlens_q[part.start : part.stop + 1]
        return attention(
            self.query[starts[0] : starts[-1]],
            self.cache,
            block_tables=self.block_tables[part],
            cu_seqlens_q=starts - starts[0],
            seq_lens=self.seq_lens[part],
            max_query_len=int(starts.diff().max()),
            scale=self.scale,
            window=window,
            value_dim=self.value_dim,
            uncoded_tables=None if self.uncoded_tables is None else self.uncoded_tables[part],
        )

    def attend_chunk(
        self,
        start: int,
        end: int,
        window: int | None,
        attention: Attention = paged_attention_reference,
    ) -> torch.Tensor:
        """Queries `start` to `end` of the first request, all of whose keys are new."""
        return attention(
            self.query[start:end],
            self.cache,
            block_tables=self.block_tables[:1],
            cu_seqlens_q=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=torch.tensor([end]),
            max_query_len=end - start,
            scale=self.scale,
            window=window,
        )
