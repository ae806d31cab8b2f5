"""The table of the Triton kernels."""

from typing import Any

import torch
from torch import Tensor

from localllm_kernels.attention.decode import (
    MIN_DOT_ROWS,
    WIDE_VALUES,
    max_decode_rows,
    paged_attention_decode,
)
from localllm_kernels.attention.kv_cache import KVCache
from localllm_kernels.attention.paged_attention import in_parts_of_heads, paged_attention_reference
from localllm_kernels.attention.prefill import paged_attention_prefill
from localllm_kernels.attention.rotate_and_store import rotate_and_store_reference
from localllm_kernels.attention.rotate_and_store_launch import rotate_and_store
from localllm_kernels.compiling.choice import ALL_OWN, Choice, Piece
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.compiling.tunings import Tunings
from localllm_kernels.experts.route import route_reference
from localllm_kernels.experts.route_launch import route
from localllm_kernels.ops import Ops
from localllm_kernels.pointwise.gate import gate_reference
from localllm_kernels.pointwise.gate_launch import gate
from localllm_kernels.pointwise.rms_norm import add_rms_norm_reference, rms_norm_reference
from localllm_kernels.pointwise.rms_norm_launch import add_rms_norm, rms_norm
from localllm_kernels.products.gpu_linears import GpuLinears
from localllm_kernels.products.traits import TRITON_TRAITS
from localllm_kernels.recurrence.launch import recurrence
from localllm_kernels.recurrence.recurrence import recurrence_reference
from localllm_kernels.recurrence.short_conv import short_conv_reference
from localllm_kernels.recurrence.short_conv_launch import short_conv
from localllm_kernels.sampling.gumbel_argmax import gumbel_argmax_reference
from localllm_kernels.sampling.row_maxima import row_maxima_reference
from localllm_kernels.sampling.sample import sample_reference
from localllm_kernels.sampling.sample_launch import sample


def triton_ops(
    device: str,
    *,
    deterministic: bool = False,
    tunings: Tunings | None = None,
    choice: Choice = ALL_OWN,
) -> Ops:
    """The table of the Triton kernels, for the current device of that type.

    `deterministic`: sums are never split among programs, and attention uses one kernel for few and
    many queries; products must always be given the same number of rows.
    """
    workspace = Workspace(
        torch.device(device),
        splits=not deterministic,
        tunings=tunings,
        fragment_rows=choice.fragment_rows,
        key_fragments=choice.key_fragments,
    )

    def most_rows(query: Tensor, cache: KVCache, value_dim: int) -> int:
        return max_decode_rows(query.itemsize, value_dim, is_4_bit=cache.coding is not None)

    def attend(query: Tensor, cache: KVCache, **arguments: Any) -> Tensor:
        group = query.shape[1] // cache.key.shape[1]
        rows = arguments["max_query_len"] * group
        most = most_rows(query, cache, arguments["value_dim"])
        has_few = not deterministic and rows <= most
        if (Piece.FEW_QUERIES if has_few else Piece.MANY_QUERIES) in choice.to_torch:
            return paged_attention_reference(query, cache, **arguments)
        if has_few:
            return paged_attention_decode(query, cache, workspace, **arguments)
        # A request in decode beside another one's prefill has many keys and one query: that is for
        # the decode kernel, whose programs share the keys.
        few = 0 if deterministic or len(arguments["seq_lens"]) == 1 else MIN_DOT_ROWS // group
        if not few or Piece.FEW_QUERIES in choice.to_torch:
            return paged_attention_prefill(query, cache, workspace, **arguments)
        out = paged_attention_prefill(query, cache, workspace, **arguments, least_queries=few + 1)
        arguments["max_query_len"] = few
        return paged_attention_decode(query, cache, workspace, **arguments, out=out)

    def paged_attention(
        query: Tensor, cache: KVCache, *, value_dim: int | None = None, **arguments: Any
    ) -> Tensor:
        value_dim = query.shape[2] if value_dim is None else value_dim
        most = query.shape[1]
        if value_dim > WIDE_VALUES:
            most = most_rows(query, cache, value_dim)
        arguments["value_dim"] = value_dim
        return in_parts_of_heads(attend, most, query, cache, **arguments)

    def own(piece: Piece, kernel: Any, reference: Any) -> Any:
        return reference if piece in choice.to_torch else kernel

    return Ops(
        traits=TRITON_TRAITS,
        rms_norm=own(Piece.NORMS, rms_norm, rms_norm_reference),
        add_rms_norm=own(Piece.NORMS, add_rms_norm, add_rms_norm_reference),
        rotate_and_store=own(Piece.ROTATION, rotate_and_store, rotate_and_store_reference),
        gate=own(Piece.GATE, gate, gate_reference),
        route=own(Piece.ROUTE, route, route_reference),
        paged_attention=paged_attention,
        row_maxima=row_maxima_reference,
        gumbel_argmax=gumbel_argmax_reference,
        linears=GpuLinears(workspace, choice),
        short_conv=own(Piece.RECURRENCES, short_conv, short_conv_reference),
        recurrence=own(Piece.RECURRENCES, recurrence, recurrence_reference),
        sample=own(Piece.SAMPLING, sample, sample_reference),
        choice=choice,
    )
