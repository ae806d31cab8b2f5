"""The operators of the C library as Python callables; for what they do, see the torch references.

All take and return contiguous float32; only keys and values in the cache may have other types.
"""

import ctypes
from ctypes import Structure
from typing import Unpack

import torch
from torch import Tensor

from localllm_kernels.attention.four_bits import OWN_KEYS
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.paged_attention import (
    AttentionArguments,
    paged_attention_reference,
)
from localllm_kernels.cpu import structs
from localllm_kernels.cpu.structs import cache_struct, no_cache, pointer, uncoded_struct
from localllm_kernels.cpu.team import Team
from localllm_kernels.experts.route import Routing
from localllm_kernels.pointwise.gate import GATE_KINDS, GateKind, parts_of
from localllm_kernels.recurrence.recurrence import Heads, RecurrenceRows, RecurrenceWeights
from localllm_kernels.recurrence.state_cache import StateCache, States, StateSlots
from localllm_kernels.trellis_ways import MOST_COLUMNS, steps_by_way

# The most heads that may share keys: the rows of a task, QUERY_ROWS of attention_rows.h.
MAX_GROUP = 128


class CpuOps:
    """The pointwise operators and attention."""

    def __init__(self, library: ctypes.CDLL, team: Team) -> None:
        self._library, self._team = library, team

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See rms_norm_reference."""
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        self._library.rms_norm(
            x.data_ptr(),
            weight.data_ptr(),
            eps,
            out.data_ptr(),
            x.numel() // width,
            width,
            self._team.size,
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """See add_rms_norm_reference."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._library.add_rms_norm(
            x.data_ptr(),
            residual.data_ptr(),
            weight.data_ptr(),
            eps,
            total.data_ptr(),
            out.data_ptr(),
            x.shape[0],
            x.shape[1],
            self._team.size,
        )
        return out, total

    def gate(self, gate_up: Tensor, kind: GateKind) -> Tensor:
        """See gate_reference."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // parts_of(kind)
        out = gate_up.new_empty(rows, width)
        number, threads = GATE_KINDS.index(kind), self._team.size
        self._library.gate(gate_up.data_ptr(), out.data_ptr(), rows, width, number, threads)
        return out

    def route(self, logits: Tensor, how: Routing) -> tuple[Tensor, Tensor]:
        """See route_reference. Raises: MemoryError."""
        logits = logits.contiguous()
        rows, experts = logits.shape
        chosen = torch.empty(rows, how.top_k, dtype=torch.int32)
        factors = torch.empty(rows, how.top_k)
        asked = routing_struct(how, experts)
        asked.logits, asked.rows = logits.data_ptr(), rows
        asked.chosen, asked.factors = chosen.data_ptr(), factors.data_ptr()
        if self._library.route(ctypes.addressof(asked), self._team.size):
            raise MemoryError("out of memory for the choice of experts")
        return chosen, factors

    def short_conv(
        self,
        rows: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        cache: StateCache,
        states: States,
    ) -> Tensor:
        """See short_conv_reference."""
        taps, width = weight.shape
        states = states.on_host
        out = _rows_of(rows.shape[0], width, states)
        where, arrays = slots_in_c(states)
        conv = structs.ShortConv(
            rows.data_ptr(),
            weight.data_ptr(),
            pointer(bias),
            cache.rows.data_ptr(),
            out.data_ptr(),
            width,
            taps,
            cache.rows.shape[1],
        )
        threads = self._team.size
        self._library.short_conv(ctypes.addressof(conv), ctypes.addressof(where), threads)
        del arrays  # which must live as long as the call
        return out

    def recurrence(
        self,
        rows: RecurrenceRows,
        weights: RecurrenceWeights,
        heads: Heads,
        cache: StateCache,
        states: States,
    ) -> Tensor:
        """See recurrence_reference."""
        assert cache.matrix is not None
        states = states.on_host
        out = _rows_of(len(rows.inputs), heads.values, states)
        where, arrays = slots_in_c(states)
        net = recurrence_struct(weights, heads)
        call = structs.RecurrenceCall(
            ctypes.pointer(net),
            structs.Inputs(
                rows.inputs.data_ptr(),
                rows.factors.data_ptr(),
                rows.inputs.stride(0),
                rows.factors.stride(0),
                heads.conv_width,
                heads.factors,
                cache.rows.data_ptr(),
                cache.rows.shape[1],
            ),
            rows.gate.data_ptr(),
            rows.gate.stride(0),
            cache.matrix.data_ptr(),
            cache.matrix.dtype == torch.float16,
            out.data_ptr(),
        )
        pointers = ctypes.addressof(call), ctypes.addressof(where)
        if self._library.recurrence(*pointers, self._team.size):
            raise MemoryError("out of memory for a recurrence")
        del arrays  # which must live as long as the call
        return out

    def rotate_and_store(
        self,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: KVCache | None,
        slot_mapping: Tensor,
        *,
        query_norm: Tensor | None = None,
        key_norm: Tensor | None = None,
        eps: float = 0.0,
        has_values: bool = True,
        norms_values: bool = False,
        uncoded_slots: Tensor | None = None,
    ) -> Tensor:
        """See rotate_and_store_reference."""
        rows, all_heads, head_dim = qkv.shape
        own = no_cache(head_dim) if cache is None else cache_struct(cache)
        uncoded = no_cache(head_dim) if cache is None else uncoded_struct(cache)
        heads = all_heads - (2 if has_values else 1) * own.kv_heads
        query = qkv.new_empty(rows, heads, head_dim)
        rotation = structs.Rotation(
            cos.data_ptr(),
            sin.data_ptr(),
            pointer(query_norm),
            pointer(key_norm),
            eps,
            slot_mapping.data_ptr(),
            own,
            pointer(uncoded_slots),
            uncoded,
            rows,
            slot_mapping.shape[0],
            heads,
            has_values,
            norms_values,
            all_heads * head_dim,
        )
        threads = self._team.size
        asked = ctypes.addressof(rotation)
        if self._library.rotate_and_store(asked, qkv.data_ptr(), query.data_ptr(), threads):
            raise ValueError(f"head size {head_dim} is too large")
        return query

    def sigmoid_gate(self, x: Tensor, gate: Tensor) -> Tensor:
        """See sigmoid_gate_reference."""
        out, threads = torch.empty_like(x), self._team.size
        pointers = x.data_ptr(), gate.data_ptr(), gate.stride(0), out.data_ptr()
        self._library.sigmoid_gate(*pointers, *x.shape, threads)
        return out

    def row_maxima(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """See row_maxima_reference."""
        values = values.contiguous()
        rows, width = values.shape
        maxima = values.new_empty(rows)
        indices = torch.empty(rows, dtype=torch.int64)
        failed = self._library.row_maxima(
            values.data_ptr(),
            maxima.data_ptr(),
            indices.data_ptr(),
            rows,
            width,
            self._team.size,
        )
        if failed:
            raise MemoryError("out of memory to search a row")
        return maxima, indices

    def best_ways(
        self, work: Tensor, factor: Tensor, states: Tensor, kept: int
    ) -> tuple[Tensor, Tensor]:
        """See best_ways_reference."""
        (rows, columns), table = work.shape, steps_by_way()
        windows = torch.empty(rows, kept, dtype=torch.uint8)
        errors = torch.empty(rows, kept)
        failed = self._library.trellis_ways(
            work.data_ptr(),
            factor.data_ptr(),
            table.data_ptr(),
            states.data_ptr(),
            windows.data_ptr(),
            errors.data_ptr(),
            rows,
            work.stride(0),
            factor.stride(0),
            columns,
            kept,
            self._team.size,
        )
        if failed:
            raise ValueError(f"{columns} columns are more than {MOST_COLUMNS}")
        return windows, errors

    def gumbel_argmax(
        self, values: Tensor, temperature: float, token_ids: Tensor | None, key: int
    ) -> int:
        """See gumbel_argmax_reference."""
        values = values.contiguous()
        winner: int = self._library.gumbel_argmax(
            values.data_ptr(),
            pointer(token_ids),
            temperature,
            key,
            values.shape[0],
            self._team.size,
        )
        return winner

    def paged_attention(
        self,
        query: Tensor,
        cache: KVCache,
        **how: Unpack[AttentionArguments],
    ) -> Tensor:
        """See paged_attention_reference, which takes wider heads; at most MAX_GROUP share keys."""
        out, value_dim = torch.zeros_like(query), how.get("value_dim")
        block_tables, uncoded_tables = how["block_tables"], how.get("uncoded_tables")
        shape = structs.AttentionShape(
            cache_struct(cache),
            query.shape[1],
            how["window"] or 0,
            how["scale"],
            how.get("cap") or 0.0,
            pointer(how.get("sinks")),
            how.get("num_hidden", 0),
            0 if cache.uncoded is None else OWN_KEYS,
            uncoded_struct(cache),
        )
        failed = self._library.paged_attention(
            ctypes.addressof(shape),
            query.data_ptr(),
            block_tables.data_ptr(),
            block_tables.shape[1],
            pointer(uncoded_tables),
            0 if uncoded_tables is None else uncoded_tables.shape[1],
            how["cu_seqlens_q"].data_ptr(),
            how["seq_lens"].data_ptr(),
            out.data_ptr(),
            len(block_tables),
            self._team.size,
        )
        if failed:
            return paged_attention_reference(query, cache.rows, **how)
        return out if value_dim is None else out[..., :value_dim].contiguous()


def routing_struct(how: Routing, num_experts: int) -> Structure:
    """It without rows; it points to the vectors of `how`."""
    return structs.Routing(
        correction=pointer(how.correction),
        scales=pointer(how.scales),
        experts=num_experts,
        top_k=how.top_k,
        is_sigmoid=how.is_sigmoid,
        renormalises=how.renormalises,
        groups=how.groups,
        chosen_groups=how.chosen_groups,
        group_best=how.group_best,
        factor=how.factor,
    )


def _rows_of(padded: int, width: int, states: StateSlots) -> Tensor:
    """Rows of a batch, with zeros behind them; torch.zeros would leave threads spinning."""
    out = torch.empty(padded, width)
    for row in range(states.bounds[-1], padded):
        out[row] = 0
    return out


def slots_in_c(states: StateSlots) -> tuple[Structure, tuple[object, ...]]:
    """The slots, and the arrays that they point to."""
    saves = [each for save in states.saves for each in (save.request, save.num_rows, save.slot)]
    arrays = tuple(
        (ctypes.c_int64 * len(each))(*each)
        for each in (
            states.slots,
            states.bounds,
            states.starts,
            states.stands,
            states.settled,
            saves,
        )
    )
    pointers = map(ctypes.addressof, arrays)
    return structs.StateSlots(*pointers, len(states.slots), len(states.saves)), arrays


def recurrence_struct(weights: RecurrenceWeights, heads: Heads) -> Structure:
    """The weights, which must live as long as what is returned."""
    vectors = weights.decay, weights.bias, weights.skip, weights.norm
    sizes = heads.num_keys, heads.num_values, heads.key_width, heads.value_width
    return structs.Recurrence(
        structs.ConvWeights(pointer(weights.conv), pointer(weights.conv_bias), *weights.conv.shape),
        *map(pointer, vectors),
        *sizes,
        *heads.firsts,
        heads.is_delta,
        weights.eps,
        weights.most,
    )
