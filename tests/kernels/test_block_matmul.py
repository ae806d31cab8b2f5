"""Products with GGUF's blocks under Triton's interpreter, against their exact values."""

import pytest
import torch
from blocks import random_blocks
from guards import GuardedMemory, needs_interpreter
from in_turns import in_turns

from localllm.model.packed.blocks import BlockWeight
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.linears import BlockRows
from localllm_kernels.products.block_codes import LARGE_BYTES, SMALL_BYTES
from localllm_kernels.products.block_matmul import block_matmul, dequantize_rows
from localllm_kernels.products.block_weight import PackedBlocks

pytestmark = needs_interpreter

TYPES = [*LARGE_BYTES, *SMALL_BYTES]
# Of values that are rounded to float16 before the product, and of sums that are rounded to it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}


def workspace_of(num_processors: int) -> Workspace:
    workspace = Workspace(torch.device("cpu"))
    workspace.num_processors = num_processors
    return workspace


@pytest.mark.parametrize("name", TYPES)
def test_values_of_a_type_are_exact(name: str) -> None:
    width = 512 if name in LARGE_BYTES else 416
    weight = random_blocks(name, 5, width)
    with GuardedMemory() as memory:
        out = torch.empty(5, width)
        dequantize_rows(BlockRows(name, memory.guarded(weight.codes)), out)
    memory.check()
    torch.testing.assert_close(out, weight.dequantize(), rtol=1e-6, atol=0)
