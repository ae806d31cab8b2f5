"""The traits of the Triton kernels."""

import torch

from localllm_kernels.compiling.traits import Traits, WeightLayout
from localllm_kernels.products.fp8_matmul import takes_blocks
from localllm_kernels.products.int4_weight import takes_groups


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
    return False


TRITON_TRAITS = Traits("triton", triton_multiplies, captures=True, fused_kinds=frozenset(("int4",)))
