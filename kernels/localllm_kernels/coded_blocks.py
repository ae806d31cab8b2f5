"""GGUF's blocks as codes with scales, for kernels that know no blocks."""

from collections.abc import Iterator
from itertools import groupby

import torch

from localllm_kernels.linears import BlockRows, BlocksWeight, CodedWeight


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
