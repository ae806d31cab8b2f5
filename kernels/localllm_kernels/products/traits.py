"""The traits of the Triton kernels."""

import torch

from localllm_kernels.coded_blocks import BLOCK_TYPES
from localllm_kernels.compiling.traits import Traits, WeightLayout
from localllm_kernels.experts.stacked_weight import can_stack, takes_group
from localllm_kernels.products.int4_weight import takes_groups
from localllm_kernels.trellis import MIN_MIXED, num_mixed


def takes_blocks(block_width: int, width_in: int) -> bool:
    """Whether the kernel of fp8 supports scales for blocks of `block_width` inputs."""
    return block_width >= width_in or block_width % 128 == 0


def triton_multiplies(layout: WeightLayout, dtype: torch.dtype, device: str) -> bool:
    """As each kernel states for itself."""
    match layout.kind:
        case "int4":
            return takes_groups(layout.group)
        case "int8":
            return True
        case "fp8":
            return takes_blocks(layout.group, layout.width_in)
        case "mxfp4":
            return True
        case "trellis3":
            return num_mixed(layout.width_in) >= MIN_MIXED
        case "nvfp4":
            return takes_group("nvfp4", layout.group, layout.width_in)
    return layout.kind in BLOCK_TYPES


# Blocks of Q4_0 become weights of int4, see `coded_blocks.as_coded`.
_FUSED = frozenset(("int4", "Q4_0"))
TRITON_TRAITS = Traits(
    "triton",
    triton_multiplies,
    moves_experts=lambda layout: layout is None or can_stack(layout),
    captures=True,
    fused_kinds=_FUSED,
)
