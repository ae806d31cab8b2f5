"""Which table of operators a backend, a device and a dtype ask for."""

import torch

from localllm_kernels.compiling.traits import TORCH_TRAITS, Traits
from localllm_kernels.cpu.build import find_compiler
from localllm_kernels.cpu.traits import C_TRAITS
from localllm_kernels.products.traits import TRITON_TRAITS


def wanted_traits(device: str, requested: str, dtype: torch.dtype) -> Traits:
    """The traits of the best table for a device type (`cpu`, `cuda`), a `--backend` (`auto`,
    `torch`, `triton`) and weights of `dtype`.
    """
    if requested == "triton" or (device == "cuda" and requested == "auto"):
        return TRITON_TRAITS
    if device == "cpu" and requested == "auto" and dtype != torch.float16:
        return C_TRAITS
    return TORCH_TRAITS


def find_traits(device: str, requested: str, dtype: torch.dtype) -> Traits:
    """The traits of the table that `select_ops` takes, unless something fails once it is tried."""
    wanted = wanted_traits(device, requested, dtype)
    return TORCH_TRAITS if wanted is C_TRAITS and not find_compiler() else wanted
