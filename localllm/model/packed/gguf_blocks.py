"""The values of GGUF's blocks, exactly: the reference of every product with them.

Source of the layouts: `src/ggml-common.h` and `src/ggml-quants.c` of ggml. Most codes of four bits
lie in halves: the low bits of all bytes are the first half of the values.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from localllm.files.gguf import BLOCK_TYPES, BlockType
from localllm.model.packed.grid_blocks import GRID_VALUES

# Of IQ4_NL and IQ4_XS, by code.
IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
# Of MXFP4, doubled, by code; the upper eight are negative.
MXFP4_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def dequantize_blocks(block: BlockType, codes: Tensor) -> Tensor:
    """Values of blocks of a type, float32 [rows, in]; `codes`: uint8 [rows, bytes]."""
    blocks = codes.reshape(-1, block.num_bytes)
    return VALUES[block.name](blocks).reshape(codes.shape[0], -1)


def _half(blocks: Tensor, start: int) -> Tensor:
    """The 16-bit float at a byte of each block, as [blocks, 1] in 32 bits."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _halves(codes: Tensor) -> Tensor:
    """Codes of four bits: the low ones of all bytes, then the high ones; in the last dimension."""
    return torch.cat((codes & 15, codes >> 4), dim=-1)


def _bits(codes: Tensor, width: int) -> Tensor:
    """The codes of `width` bits in bytes [..., n], lowest first: [..., 8 / width, n]."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=codes.device)
    return codes[..., None, :] >> shifts[:, None] & ((1 << width) - 1)


def _fifth_bits(blocks: Tensor, start: int) -> Tensor:
    """The fifth bits of 32 values, those of the four bytes from `start` on: [blocks, 32]."""
    return _bits(blocks[:, start : start + 4], 1).transpose(1, 2).reshape(-1, 32) << 4


def _q1_0(blocks: Tensor) -> Tensor:
    signs = 2 * _bits(blocks[:, 2:], 1).transpose(1, 2).flatten(1).float() - 1
    return signs * _half(blocks, 0)


def _q2_0(blocks: Tensor) -> Tensor:
    codes = _bits(blocks[:, 2:], 2).transpose(1, 2).flatten(1)
    return (codes.float() - 1) * _half(blocks, 0)


def _q4_0(blocks: Tensor) -> Tensor:
    return (_halves(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _halves(blocks[:, 6:]) | _fifth_bits(blocks, 2)
    return (codes.float() - 16) * _half(blocks, 0)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _halves(blocks[:, 8:]) | _fifth_bits(blocks, 4)
    return codes.float() * _half(blocks, 0) + _half(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def _runs(codes: Tensor) -> Tensor:
    """Codes of two bits: 32 bytes serve 128 values, each pair of bits a run of 32 of them;
    [blocks, 64] bytes become [blocks, 256].
    """
    return _bits(codes.reshape(-1, 2, 32), 2).reshape(-1, 256)


def _of_16(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes times the scale of each 16 values."""
    return scales[:, :, None] * codes.reshape(-1, 16, 16).float()


def _q2_k(blocks: Tensor) -> Tensor:
    steps, codes = blocks[:, :16], _runs(blocks[:, 16:80])
    scales = _half(blocks, 80) * (steps & 15).float()
    offsets = _half(blocks, 82) * (steps >> 4).float()
    return _of_16(codes, scales) - offsets[:, :, None]


def _q3_k(blocks: Tensor) -> Tensor:
    # A bit that is not set takes four away.
    high = _bits(blocks[:, :32], 1).reshape(-1, 256)
    codes = _runs(blocks[:, 32:96]).to(torch.int8) - ((high ^ 1) << 2).to(torch.int8)
    low, upper = _halves(blocks[:, 96:104]), _bits(blocks[:, 104:108], 2).reshape(-1, 16)
    steps = (low | upper << 4).to(torch.int8) - 32
    return _of_16(codes, _half(blocks, 108) * steps.float())


def _scales_6(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight scales and eight offsets of six bits in twelve bytes, [blocks, 8] each."""
    first, second, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat((first & 63, (last & 15) | (first >> 6) << 4), dim=1)
    offsets = torch.cat((second & 63, (last >> 4) | (second >> 6) << 4), dim=1)
    return scales, offsets


def _of_32(blocks: Tensor, codes: Tensor) -> Tensor:
    """Codes [blocks, 8, 32] with the scales and offsets at the beginning of the blocks."""
    scales, offsets = _scales_6(blocks[:, 4:16])
    scale, offset = _half(blocks, 0) * scales.float(), _half(blocks, 2) * offsets.float()
    return scale[:, :, None] * codes.float() - offset[:, :, None]


def _q4_k(blocks: Tensor) -> Tensor:
    return _of_32(blocks, _bits(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def _q5_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _of_32(blocks, low | _bits(blocks[:, 16:48], 1) << 4)


def _q6_k(blocks: Tensor) -> Tensor:
    low = _bits(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 256)
    codes = (low | _runs(blocks[:, 128:192]) << 4).to(torch.int8) - 32
    scales = blocks[:, 192:208].view(torch.int8).float()
    return _of_16(codes, _half(blocks, 208) * scales)


def _iq4_values(codes: Tensor) -> Tensor:
    table = torch.tensor(IQ4_VALUES, dtype=torch.float32, device=codes.device)
    return table[codes.long()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _half(blocks, 0) * _iq4_values(_halves(blocks[:, 2:]))


def _iq4_xs(blocks: Tensor) -> Tensor:
    high = _bits(blocks[:, 2:4], 2).transpose(1, 2).reshape(-1, 8)
    low = _bits(blocks[:, 4:8], 4).transpose(1, 2).reshape(-1, 8)
    steps = (low | high << 4).to(torch.int8) - 32
    values = _iq4_values(_halves(blocks[:, 8:].reshape(-1, 8, 16)))
    return (_half(blocks, 0) * steps.float())[:, :, None] * values


def _mxfp4(blocks: Tensor) -> Tensor:
    table = torch.tensor(MXFP4_DOUBLED, dtype=torch.float32, device=blocks.device)
    # Half of the power of two, whose exponent is stored plus 127.
    exponents = blocks[:, :1].int() - 128
    return (
        torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents)
        * table[_halves(blocks[:, 1:]).long()]
    )


def _bf16(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.bfloat16).float()


def _f16(blocks: Tensor) -> Tensor:
    return _half(blocks, 0)


def _f32(blocks: Tensor) -> Tensor:
    return blocks.contiguous().view(torch.float32)


# By the name of a type: the values, float32 [blocks, values], of blocks, uint8 [blocks, bytes].
VALUES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "F32": _f32,
    "F16": _f16,
    "BF16": _bf16,
    "Q1_0": _q1_0,
    "Q2_0": _q2_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4,
    **GRID_VALUES,
}
# The types whose values are known here, by name.
BLOCKS = {each.name: each for each in BLOCK_TYPES.values() if each.name in VALUES}
