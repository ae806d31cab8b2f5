"""The properties of a table of operators, as planning, loading and benchmarks need them.

Traits are known before a library is compiled, a weight read, or a GPU touched.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

Arithmetic = Literal["fp32", "bf16", "int8"]
CodeKind = Literal["int4", "int8", "fp8", "mxfp4", "nvfp4", "trellis3"]


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """What decides a packed weight's kernel: its kind, its inputs, and how many share a scale."""

    kind: str
    width_in: int
    group: int


@dataclass(frozen=True, slots=True)
class Traits:
    """A table of operators.

    `gathers`: attention copies keys and values out of their blocks before it reads them;
    `turns_keys`: caches are turned where they can be (see KVCache);
    `rows_alike`: a row has the same bits in any batch, products included; `wide_rows`: rows are
    float32 whatever the model's dtype; `halves_weights`: a float32 weight that bfloat16 holds
    exactly is kept in bfloat16; `row_unit`: float32 rows of a batch are padded to a multiple of it;
    `captures`: steps are captured as graphs, and tokens are drawn on the device; `integer_kinds`:
    packed weights that are multiplied in int8; `fused_kinds`: those whose products include the
    norm, the gate and the residual around them; `has_kernel`: whether there is one for a weight, in
    a model of that dtype, on a device of that type; `moves_experts`: whether experts with such
    weights, None for plain ones, can stay in host memory.
    """

    name: Literal["torch", "c", "triton"]
    has_kernel: Callable[[WeightLayout, torch.dtype, str], bool]
    moves_experts: Callable[[WeightLayout | None], bool] = lambda layout: False
    gathers: bool = False
    turns_keys: bool = False
    rows_alike: bool = False
    wide_rows: bool = False
    halves_weights: bool = False
    row_unit: int = 1
    captures: bool = False
    integer_kinds: frozenset[str] = frozenset()
    fused_kinds: frozenset[str] = frozenset()

    def arithmetic(self, kind: str, dtype: torch.dtype) -> Arithmetic:
        """The arithmetic of products with weights of a kind, or with plain ones."""
        if dtype == torch.float32:
            return "fp32"
        return "int8" if kind in self.integer_kinds else "bf16"


def torch_multiplies(layout: WeightLayout, dtype: torch.dtype, device: str) -> bool:
    """torch has operators only for a CPU and bfloat16."""
    if device != "cpu" or dtype != torch.bfloat16:
        return False
    return layout.kind == "int8" or (layout.kind == "int4" and layout.group in (32, 64, 128, 256))


# The multiple of rows with which torch's float32 products on a CPU give a row the same bits in any
# batch; see docs/architecture/exactness.md.
_TORCH_ROWS = 8
TORCH_TRAITS = Traits("torch", torch_multiplies, gathers=True, row_unit=_TORCH_ROWS)
