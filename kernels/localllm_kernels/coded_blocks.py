"""GGUF's blocks as kernels take them: arranged for any thread to read, and as codes with scales for
kernels that know no blocks.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import torch

from localllm_kernels.linears import BlockRows, BlocksWeight, CodedWeight

# Values and bytes of a block, by type.
BLOCK_SIZES = {
    **{"Q4_K": (256, 144), "Q6_K": (256, 210), "Q5_K": (256, 176), "Q3_K": (256, 110)},
    **{"Q2_K": (256, 84), "IQ4_XS": (256, 136), "Q8_0": (32, 34), "Q4_0": (32, 18)},
    **{"Q4_1": (32, 20), "Q5_0": (32, 22), "Q5_1": (32, 24), "IQ4_NL": (32, 18), "MXFP4": (32, 17)},
}
# Types with products.
BLOCK_TYPES = frozenset(BLOCK_SIZES)


def as_coded(weight: BlocksWeight) -> CodedWeight | None:
    """The same weight for other kernels, exactly, if all of it is of a type that they have."""
    parts = tuple(joined(weight.parts))
    if len(parts) > 1 or parts[0].type not in ("Q4_0", "MXFP4"):
        return None
    [part] = parts
    rows = part.codes if weight.order is None else part.codes[weight.order]
    is_int4 = part.type == "Q4_0"
    num_bytes, start = (18, 2) if is_int4 else (17, 1)
    blocks = rows.view(len(rows), -1, num_bytes)
    halves = blocks[:, :, start:]
    codes = torch.cat((halves & 15, halves >> 4), dim=2).view(len(rows), weight.width_in)
    scales = blocks[:, :, :start].contiguous()
    if not is_int4:
        return CodedWeight("mxfp4", codes, scales[:, :, 0])
    return CodedWeight("int4", codes, scales.view(torch.float16)[:, :, 0])


def joined(parts: tuple[BlockRows, ...]) -> Iterator[BlockRows]:
    """The same rows; neighbouring parts of one type are one."""
    for name, alike in groupby(parts, lambda part: part.type):
        codes = [part.codes for part in alike]
        yield BlockRows(name, codes[0] if len(codes) == 1 else torch.cat(codes))


def arranged(rows: BlockRows) -> BlockRows:
    """Rows that follow each other, from an address on where any type can be read.

    The blocks of Q6_K would begin at odd halves of words: of them each row has the lower bits of
    all codes, then the upper ones, the steps and the scales, and begins at a multiple of 16 bytes.
    """
    codes = rows.codes
    if rows.type == "Q6_K":
        blocks = codes.view(len(codes), -1, 210)
        fields = [each.flatten(1) for each in torch.split(blocks, [128, 64, 16, 2], dim=2)]
        filled = codes.new_zeros(len(codes), -codes.shape[1] % 16)
        return BlockRows(rows.type, torch.cat((*fields, filled), dim=1))
    codes = codes.contiguous()
    return BlockRows(rows.type, codes if codes.data_ptr() % 16 == 0 else codes.clone())


def type_constants(name: str) -> dict[str, Any]:
    """The constants of a kernel that reads blocks of a type, see `block_codes.block_values`."""
    num_values, num_bytes = BLOCK_SIZES[name]
    return {"TYPE": name, "NUM_VALUES": num_values, "NUM_BYTES": num_bytes}
