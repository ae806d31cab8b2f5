"""Weights of random blocks in each of GGUF's types, with scales that are numbers."""

import torch
from torch import Tensor

from localllm.files.gguf import BLOCK_TYPES
from localllm.model.packed.blocks import BlockWeight

# Where the halves of a block lie that scale its codes, or are added to them.
_HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}


def random_e4m3(*shape: int) -> Tensor:
    """Positive numbers of every size that e4m3 has, zero among them."""
    return torch.randint(0x7F, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)


def random_blocks(name: str, rows: int, width: int) -> BlockWeight:
    """A weight of this type, [rows, width]."""
    [block] = [each for each in BLOCK_TYPES.values() if each.name == name]
    count = rows * width // block.num_values
    codes = torch.randint(256, (count, block.num_bytes), dtype=torch.uint8)
    for at in _HALVES.get(name, ()):
        halves = (0.02 * torch.rand(count) - 0.01).half()
        codes[:, at : at + 2] = halves.view(torch.uint8).view(count, 2)
    if name == "MXFP4":
        codes[:, 0] = torch.randint(118, 124, (count,), dtype=torch.uint8)
    return BlockWeight.of(block, codes.view(rows, -1))
