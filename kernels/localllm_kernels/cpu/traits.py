"""The traits of the C library's operators."""

import torch

from localllm_kernels.compiling.traits import Traits, WeightLayout

# Groups of the C library are multiples of its longest vectors.
C_GROUPS = 16


def c_multiplies(layout: WeightLayout, dtype: torch.dtype, device: str) -> bool:
    """Only in bfloat16, with groups of whole vectors; in float32 nothing is rounded."""
    return (
        dtype == torch.bfloat16
        and layout.kind in ("int4", "int8", "mxfp4")
        and layout.group % C_GROUPS == 0
    )


C_TRAITS = Traits(
    "c",
    c_multiplies,
    rows_alike=True,
    wide_rows=True,
    halves_weights=True,
    integer_kinds=frozenset(("int4", "int8", "mxfp4")),
)
