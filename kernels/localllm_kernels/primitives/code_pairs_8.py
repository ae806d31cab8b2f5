"""Four 8-bit codes in a word as 16-bit floats, two pairs: bytes 0 and 2, then bytes 1 and 3.

In bfloat16, seven bits of a signed integer become the mantissa of 128, its sign makes a second
float 128 or 256, and the difference of the two is the code. In float16, which has room for eight
bits, the code plus 128 becomes the mantissa of 1,024. Floats (e4m3) have their bits moved to the
places of the wider type, which gives the value except for a power of two (see `e4m3.py`). Nothing
is rounded, and no conversion instructions are used, of which a GPU does a quarter as many.
"""

import triton
import triton.language as tl

from localllm_kernels.primitives.e4m3 import from_e4m3
from localllm_kernels.primitives.matrix_units import pack_pair

_INT8_BF16 = tl.constexpr(
    "{ .reg .b32 low, sign, word;"
    " lop3.b32 low, $2, 0x007f007f, $3, 0xea; lop3.b32 sign, $2, 0x00800080, $3, 0xea;"
    " fma.rn.bf16x2 $0, sign, $4, low; shr.u32 word, $2, 8;"
    " lop3.b32 low, word, 0x007f007f, $3, 0xea; lop3.b32 sign, word, 0x00800080, $3, 0xea;"
    " fma.rn.bf16x2 $1, sign, $4, low; }"
)
_INT8_F16 = tl.constexpr(
    "{ .reg .b32 code, word;"
    " lop3.b32 code, $2, 0x00ff00ff, $3, 0x6a; add.rn.f16x2 $0, code, $4; shr.u32 word, $2, 8;"
    " lop3.b32 code, word, 0x00ff00ff, $3, 0x6a; add.rn.f16x2 $1, code, $4; }"
)
_FP8_BF16 = tl.constexpr(
    "{ .reg .b32 low, sign;"
    " shl.b32 low, $2, 4; and.b32 low, low, 0x07f007f0; shl.b32 sign, $2, 8;"
    " lop3.b32 low, sign, 0x80008000, low, 0xea; fma.rn.bf16x2 $0, low, $3, $4;"
    " shr.u32 low, $2, 4; and.b32 low, low, 0x07f007f0;"
    " lop3.b32 low, $2, 0x80008000, low, 0xea; fma.rn.bf16x2 $1, low, $3, $4; }"
)
_FP8_F16 = tl.constexpr(
    "{ .reg .b32 low, sign;"
    " shl.b32 low, $2, 7; and.b32 low, low, 0x3f803f80; shl.b32 sign, $2, 8;"
    " lop3.b32 low, sign, 0x80008000, low, 0xea; fma.rn.f16x2 $0, low, $3, $4;"
    " shr.u32 low, $2, 1; and.b32 low, low, 0x3f803f80;"
    " lop3.b32 low, $2, 0x80008000, low, 0xea; fma.rn.f16x2 $1, low, $3, $4; }"
)


@triton.jit
def _asm_constants(IS_INT8: tl.constexpr, dtype: tl.constexpr):
    """The constants that the code reads from registers: no instruction takes two immediates."""
    if IS_INT8:
        # 128 and -1; the code's sign and 1,024, and -1,152.
        return (0x43004300, -0x407F4080) if dtype == tl.bfloat16 else (0x64806480, -0x1B7F1B80)
    # 2^120 or 2^8, and -0: adding it leaves the product unchanged.
    return (0x7B807B80, -0x7FFF8000) if dtype == tl.bfloat16 else (0x5C005C00, -0x7FFF8000)


@triton.jit
def code_pairs_8(word, IS_INT8: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr):
    """`word`: int32 [threads] -> two of int32 [threads], pairs of `dtype`."""
    if PTX:
        of_int8: tl.constexpr = _INT8_BF16 if dtype == tl.bfloat16 else _INT8_F16
        of_fp8: tl.constexpr = _FP8_BF16 if dtype == tl.bfloat16 else _FP8_F16
        code: tl.constexpr = of_int8 if IS_INT8 else of_fp8
        first, second = _asm_constants(IS_INT8, dtype)
        return tl.inline_asm_elementwise(
            code,
            "=&r,=&r,r,r,r",  # the first result is written before the word is read again
            [word, tl.full(word.shape, first, tl.int32), tl.full(word.shape, second, tl.int32)],
            (tl.int32, tl.int32),
            True,
            1,
        )
    return _pair_of(word, 0, IS_INT8, dtype), _pair_of(word, 8, IS_INT8, dtype)


@triton.jit
def _pair_of(word, place: tl.constexpr, IS_INT8: tl.constexpr, dtype: tl.constexpr):
    """The codes at bits `place` and `place` + 16."""
    low, high = (word >> place) & 0xFF, (word >> (place + 16)) & 0xFF
    if IS_INT8:
        low, high = (low ^ 0x80) - 0x80, (high ^ 0x80) - 0x80
        return pack_pair(low.to(tl.float32), high.to(tl.float32), dtype, False)
    return pack_pair(from_e4m3(low), from_e4m3(high), dtype, False)
