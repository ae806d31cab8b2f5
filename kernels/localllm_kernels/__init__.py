"""Operators and their kernels: the table that a decoder is given, see `ops.py`."""

import ctypes
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from localllm_kernels.attention.paged_attention import in_parts_of_heads
from localllm_kernels.backend import wanted_traits
from localllm_kernels.compiling.choice import ALL_OWN, Choice
from localllm_kernels.compiling.tunings import Tunings
from localllm_kernels.cpu.build import BuildError, digest_of_sources, load_library
from localllm_kernels.cpu.linear import CpuLinears, multiplies_in_tiles, num_lanes
from localllm_kernels.cpu.ops import MAX_GROUP, CpuOps
from localllm_kernels.cpu.team import Team
from localllm_kernels.cpu.traits import C_TRAITS
from localllm_kernels.ops import TORCH_OPS, Ops
from localllm_kernels.products.traits import TRITON_TRAITS

__all__ = ["TORCH_OPS", "Ops", "cpu_ops", "select_ops"]

logger = logging.getLogger(__name__)


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
    ops, wanted = TORCH_OPS, wanted_traits(device, requested, dtype)
    if wanted is TRITON_TRAITS:
        # Triton and its kernels take a fifth of a second to import, which a CPU need not wait for.
        from localllm_kernels.compiling.driver import DriverError, is_interpreting, start_driver
        from localllm_kernels.triton_ops import triton_ops

        if device == "cpu" and not is_interpreting():
            raise ValueError("the triton kernels need a GPU (or TRITON_INTERPRET=1, for tests)")
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


def cpu_ops(library_folder: Path | None = None) -> Ops:
    """The table of the C library, compiled if need be; see `load_library`. Raises: BuildError."""
    library, team = load_library(library_folder), Team()
    own, in_tiles = CpuOps(library, team), multiplies_in_tiles(library)
    if ctypes.c_int64.in_dll(library, "has_tiles").value and not in_tiles:
        logger.warning("products are slower: the kernel does not let this process use AMX's tiles")
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
        best_ways=own.best_ways,
        linears=CpuLinears(library, team),
        build=f"{digest_of_sources()} {num_lanes(library)}{' in tiles' if in_tiles else ''}",
    )
