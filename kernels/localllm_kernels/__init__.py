"""The operators a decoder needs, as one table: `Ops`.

The table is filled once, when a model is loaded, and passed down as an argument; a model never
asks what it runs on. `TORCH_OPS` runs wherever torch does. Shapes and layouts are documented with
each operator, in the file of its name.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
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
from localllm_kernels.attention.rotate_and_store import rotate_and_store, rotate_and_store_reference
from localllm_kernels.backend import wanted_traits
from localllm_kernels.compiling.choice import ALL_OWN, Choice, Piece
from localllm_kernels.compiling.driver import DriverError, start_driver
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.compiling.traits import TORCH_TRAITS, Traits
from localllm_kernels.compiling.tunings import Tunings
from localllm_kernels.cpu.build import BuildError, digest_of_sources, load_library
from localllm_kernels.cpu.linear import CpuLinears, num_lanes
from localllm_kernels.cpu.ops import MAX_GROUP, CpuOps
from localllm_kernels.cpu.team import Team
from localllm_kernels.cpu.traits import C_TRAITS
from localllm_kernels.experts.route import Routing, route, route_reference
from localllm_kernels.linears import Linears
from localllm_kernels.pointwise.gate import GateKind, gate, gate_reference, sigmoid_gate_reference
from localllm_kernels.pointwise.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from localllm_kernels.products.gpu_linears import GpuLinears
from localllm_kernels.products.traits import TRITON_TRAITS
from localllm_kernels.recurrence.launch import recurrence
from localllm_kernels.recurrence.recurrence import recurrence_reference
from localllm_kernels.recurrence.short_conv import short_conv_reference
from localllm_kernels.recurrence.short_conv_launch import short_conv
from localllm_kernels.sampling.gumbel_argmax import gumbel_argmax_reference
from localllm_kernels.sampling.row_maxima import row_maxima_reference
from localllm_kernels.sampling.sample import SamplingRows, sample, sample_reference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ops:
    """Every callable a decoder uses beyond matrix products and embedding look-ups.

    `choice`: which of them are left to torch after all; `build`: what the bits of their results
    depend on besides.
    """

    traits: Traits
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    rotate_and_store: Callable[..., Tensor]
    gate: Callable[[Tensor, GateKind], Tensor]
    route: Callable[[Tensor, Routing], tuple[Tensor, Tensor]]
    paged_attention: Callable[..., Tensor]
    row_maxima: Callable[[Tensor], tuple[Tensor, Tensor]]
    gumbel_argmax: Callable[[Tensor, float, Tensor | None, int], int]
    short_conv: Callable[..., Tensor] = short_conv_reference
    sigmoid_gate: Callable[[Tensor, Tensor], Tensor] = sigmoid_gate_reference
    recurrence: Callable[..., Tensor] = recurrence_reference
    # Products with weights, if the library has its own; else torch's are used.
    linears: Linears | None = None
    # Samples the tokens of a whole batch in one launch, where that avoids waiting for the device.
    sample: Callable[[Tensor, SamplingRows], Tensor] | None = None
    choice: Choice = ALL_OWN
    build: str = ""


TORCH_OPS = Ops(
    traits=TORCH_TRAITS,
    rms_norm=rms_norm_reference,
    add_rms_norm=add_rms_norm_reference,
    rotate_and_store=rotate_and_store_reference,
    gate=gate_reference,
    route=route_reference,
    paged_attention=paged_attention_reference,
    row_maxima=row_maxima_reference,
    gumbel_argmax=gumbel_argmax_reference,
)


def select_ops(
    device: str,
    requested: str,
    dtype: torch.dtype,
    *,
    library_folder: Path | None = None,
    deterministic: bool = False,
    tunings: Tunings | None = None,
    choose: Callable[[], Choice] = lambda: ALL_OWN,
) -> Ops:
    """The table for a device type (`cpu`, `cuda`), a `--backend` (`auto`, `torch`, `triton`) and
    weights of `dtype`.

    `library_folder`: where the C library is kept, see `load_library`; `deterministic`: one path for
    every row, where there would be several; `tunings`: configurations of Triton's kernels by shape;
    `choose`: which of them to use, asked only if they can be launched on a GPU.

    Raises: ValueError for a backend that is not available.
    """
    if requested not in ("auto", "torch", "triton"):
        raise ValueError(f"unknown backend {requested!r}; known: auto, torch, triton")
    is_interpreted = triton.knobs.runtime.interpret
    if requested == "triton" and device == "cpu" and not is_interpreted:
        raise ValueError("the triton kernels need a GPU (or TRITON_INTERPRET=1, for tests)")
    ops, wanted = TORCH_OPS, wanted_traits(device, requested, dtype)
    if wanted is TRITON_TRAITS:
        try:
            choice = ALL_OWN
            if device == "cuda":
                start_driver()
                choice = choose()
            ops = triton_ops(device, deterministic=deterministic, tunings=tunings, choice=choice)
        except DriverError as error:
            if requested == "triton":
                raise ValueError(str(error)) from error
            logger.warning("torch's operators are used, which are slower: %s", error)
    elif wanted is C_TRAITS:
        try:
            ops = cpu_ops(library_folder)
        except BuildError as error:
            logger.warning("torch's operators are used, which are slower: %s", error)
    logger.info("operators: %s on %s", ops.traits.name, device)
    return ops


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

    def attend(query: Tensor, cache: KVCache, **arguments: Any) -> Tensor:
        group = query.shape[1] // cache.key.shape[1]
        rows = arguments["max_query_len"] * group
        most = max_decode_rows(query.itemsize, arguments["value_dim"])
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
            most = max_decode_rows(query.itemsize, value_dim)
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


def cpu_ops(library_folder: Path | None = None) -> Ops:
    """The table of the C library, compiled if need be; see `load_library`. Raises: BuildError."""
    library, team = load_library(library_folder), Team()
    own = CpuOps(library, team)
    return Ops(
        traits=C_TRAITS,
        rms_norm=own.rms_norm,
        add_rms_norm=own.add_rms_norm,
        rotate_and_store=own.rotate_and_store,
        gate=own.gate,
        route=own.route,
        paged_attention=partial(in_parts_of_heads, own.paged_attention, MAX_GROUP),
        row_maxima=own.row_maxima,
        gumbel_argmax=own.gumbel_argmax,
        short_conv=own.short_conv,
        recurrence=own.recurrence,
        sigmoid_gate=own.sigmoid_gate,
        linears=CpuLinears(library, team),
        build=f"{digest_of_sources()} {num_lanes(library)}",
    )
