"""The operators a decoder needs, as one table: `Ops`.

The table is filled once, when a model is loaded, and passed down as an argument; a model never
asks what it runs on. `TORCH_OPS` runs wherever torch does. Shapes and layouts stand with each
operator, in the file of its name.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from localllm_kernels.paged_attention import paged_attention_reference
from localllm_kernels.rms_norm import add_rms_norm_reference, rms_norm_reference
from localllm_kernels.rotary import apply_rotary_reference
from localllm_kernels.silu_mul import silu_mul_reference
from localllm_kernels.store_kv import store_kv_reference

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ops:
    """Every callable a decoder uses beyond matrix products and embedding look-ups."""

    name: str
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    add_rms_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]
    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor]
    silu_mul: Callable[[Tensor], Tensor]
    store_kv: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    paged_attention: Callable[..., Tensor]


TORCH_OPS = Ops(
    name="torch",
    rms_norm=rms_norm_reference,
    add_rms_norm=add_rms_norm_reference,
    apply_rotary=apply_rotary_reference,
    silu_mul=silu_mul_reference,
    store_kv=store_kv_reference,
    paged_attention=paged_attention_reference,
)


def select_ops(device: str, requested: str) -> Ops:
    """The table for a device type (`cpu`, `cuda`) and a `--backend` (`auto`, `torch`, `triton`).

    Raises: ValueError for a backend that is not to be had.
    """
    if requested == "triton":
        raise ValueError("the triton kernels are not part of this version")
    if requested not in ("auto", "torch"):
        raise ValueError(f"unknown backend {requested!r}; known: auto, torch, triton")
    logger.info("operators: %s on %s", TORCH_OPS.name, device)
    return TORCH_OPS
