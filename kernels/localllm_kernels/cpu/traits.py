"""The traits of the C library's operators."""

import torch

from localllm_kernels.compiling.traits import Traits, WeightLayout

# Groups of the C library are multiples of its longest vectors.
C_GROUPS = 16
# Of fp8, of pairs of numbers in them.
FP8_GROUPS = 32


# Weights that are multiplied in int8.
INTEGER_KINDS = frozenset(("int4", "int8", "mxfp4", "nvfp4", "trellis3"))
# Types of GGUF's blocks with products.
C_BLOCKS = frozenset(
    (
        *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ4_NL", "IQ4_XS", "MXFP4"),
    )
)


def c_multiplies(layout: WeightLayout, dtype: torch.dtype, device: str) -> bool:
    """Only in bfloat16, with groups of whole vectors; in float32 nothing is rounded."""
    if dtype != torch.bfloat16:
        return False
    if layout.kind == "fp8":
        return layout.group >= layout.width_in or layout.group % FP8_GROUPS == 0
    is_grouped = layout.kind in INTEGER_KINDS and layout.group % C_GROUPS == 0
    return is_grouped or layout.kind in C_BLOCKS


C_TRAITS = Traits(
    "c",
    c_multiplies,
    turns_keys=True,
    rows_alike=True,
    wide_rows=True,
    halves_weights=True,
    integer_kinds=INTEGER_KINDS | C_BLOCKS,
)
