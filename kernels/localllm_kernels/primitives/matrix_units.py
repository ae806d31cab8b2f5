"""One step of a GPU's matrix units on registers, as each thread sees it.

Triton's `tl.dot` takes tiles and moves them between threads through shared memory and barriers.
Where operands are in memory as the units want them (`int4_weight.py`), nothing needs to move. The
instruction is PTX's `mma.sync.aligned.m16n8k16` with sums in float32 (PTX ISA, "Matrix Fragments
for mma.m16n8k16 with floating point type"). All of its operands are tensors [threads] with one
value per thread:

    a   four int32 of two 16-bit floats each: rows g and g + 8 with the first half of the inputs,
        then with the second
    b   one int64 of four 16-bit floats: column g
    c   four float32: row g, columns 2 t and 2 t + 1; then row g + 8

for lane 4 g + t. Without PTX the same is computed with operations that every backend has, including
the interpreter.
"""

import triton
import triton.language as tl

_BF16 = tl.constexpr(
    "{ .reg .b32 low, high; mov.b64 {low, high}, $8;"
    " mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {low, high}, {$9, $10, $11, $12}; }"
)
_F16 = tl.constexpr(
    "{ .reg .b32 low, high; mov.b64 {low, high}, $8;"
    " mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"
    " {$0, $1, $2, $3}, {$4, $5, $6, $7}, {low, high}, {$9, $10, $11, $12}; }"
)
_MULTIPLY_BF16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d, zero; mov.b64 {a, b}, $1; mov.b64 {c, d}, $2;"
    " mov.b32 zero, 0x80008000;"  # -0: the sum with it is the product
    " fma.rn.bf16x2 a, a, c, zero; fma.rn.bf16x2 b, b, d, zero; mov.b64 $0, {a, b}; }"
)
_MULTIPLY_F16 = tl.constexpr(
    "{ .reg .b32 a, b, c, d; mov.b64 {a, b}, $1; mov.b64 {c, d}, $2;"
    " mul.rn.f16x2 a, a, c; mul.rn.f16x2 b, b, d; mov.b64 $0, {a, b}; }"
)
_ADD_BF16 = tl.constexpr(
    "{ .reg .b32 one; mov.b32 one, 0x3f803f80; fma.rn.bf16x2 $0, $1, one, $2; }"
)
_ADD_F16 = tl.constexpr("add.rn.f16x2 $0, $1, $2;")
_TRANSPOSE = tl.constexpr("movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;")
_MAX_OF_ROWS = tl.constexpr(
    "{ .reg .f32 x, y; shfl.sync.bfly.b32 y, $1, 4, 31, 0xffffffff; max.f32 x, $1, y;"
    " shfl.sync.bfly.b32 y, x, 8, 31, 0xffffffff; max.f32 x, x, y;"
    " shfl.sync.bfly.b32 y, x, 16, 31, 0xffffffff; max.f32 $0, x, y; }"
)
_MASK_OR = tl.constexpr("lop3.b32 $0, $1, 0x000f000f, $2, 0xea;")  # ($1 & mask) | $2


@triton.jit
def first_of(pair, dtype: tl.constexpr):
    """The float32 of the lower 16 bits of int32."""
    if dtype == tl.bfloat16:
        return (pair << 16).to(tl.float32, bitcast=True)
    return (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def second_of(pair, dtype: tl.constexpr):
    """The float32 of the upper 16 bits of int32."""
    if dtype == tl.bfloat16:
        return ((pair >> 16) << 16).to(tl.float32, bitcast=True)
    return ((pair >> 16) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def pairs_of(four):
    """Both int32 of int64: the first two of four 16-bit floats, and the last two."""
    return (four & 0xFFFFFFFF).to(tl.int32), (four >> 32).to(tl.int32)


@triton.jit
def two_as_four(low, high):
    """The inverse of `pairs_of`."""
    return (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)


@triton.jit
def _pack(first, second, dtype: tl.constexpr):
    """Two float32 as 16-bit floats in int32."""
    low = first.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (second.to(dtype).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def pack_pair(first, second, dtype: tl.constexpr, PTX: tl.constexpr):
    """Two float32 as 16-bit floats in int32, the first one in the lower half."""
    if PTX:
        code: tl.constexpr = (
            "cvt.rn.bf16x2.f32 $0, $2, $1;"
            if dtype == tl.bfloat16
            else "cvt.rn.f16x2.f32 $0, $2, $1;"
        )
        return tl.inline_asm_elementwise(code, "=r,f,f", [first, second], tl.int32, True, 1)
    return _pack(first, second, dtype)


@triton.jit
def transpose_pairs(x, dtype: tl.constexpr, PTX: tl.constexpr):
    """The transpose of 8 rows by 8 columns, int32 [threads]: lane 4 g + t has columns 2 t and
    2 t + 1 of row g, before and after (PTX ISA, "movmatrix").
    """
    if PTX:
        return tl.inline_asm_elementwise(_TRANSPOSE, "=r,r", [x], tl.int32, False, 1)
    WARPS: tl.constexpr = x.shape[0] // 32
    shape: tl.constexpr = [WARPS, 8, 4]
    values = tl.join(tl.reshape(first_of(x, dtype), shape), tl.reshape(second_of(x, dtype), shape))
    turned = tl.permute(tl.reshape(values, [WARPS, 8, 8]), (0, 2, 1))
    even, odd = tl.split(tl.reshape(turned, [WARPS, 8, 4, 2]))
    return _pack(tl.reshape(even, [32 * WARPS]), tl.reshape(odd, [32 * WARPS]), dtype)


@triton.jit
def max_of_rows(x, PTX: tl.constexpr):
    """For each t, the greatest of the eight lanes 4 g + t, in all of them; float32 [threads]."""
    if PTX:
        return tl.inline_asm_elementwise(_MAX_OF_ROWS, "=f,f", [x], tl.float32, False, 1)
    WARPS: tl.constexpr = x.shape[0] // 32
    most = tl.max(tl.reshape(x, [WARPS, 8, 4]), axis=1)
    return tl.reshape(tl.broadcast_to(most[:, None, :], [WARPS, 8, 4]), [32 * WARPS])


@triton.jit
def multiply_fours(x, y, dtype: tl.constexpr, PTX: tl.constexpr):
    """Four products at once, each rounded; int64 [threads]."""
    if PTX:
        code: tl.constexpr = _MULTIPLY_BF16 if dtype == tl.bfloat16 else _MULTIPLY_F16
        return tl.inline_asm_elementwise(code, "=l,l,l", [x, y], tl.int64, True, 1)
    a, b = pairs_of(x)
    c, d = pairs_of(y)
    low = _pack(
        first_of(a, dtype) * first_of(c, dtype), second_of(a, dtype) * second_of(c, dtype), dtype
    )
    high = _pack(
        first_of(b, dtype) * first_of(d, dtype), second_of(b, dtype) * second_of(d, dtype), dtype
    )
    return two_as_four(low, high)


@triton.jit
def add_pairs(x, y, dtype: tl.constexpr, PTX: tl.constexpr):
    """Two sums at once, each rounded; int32 [threads]."""
    if PTX:
        code: tl.constexpr = _ADD_BF16 if dtype == tl.bfloat16 else _ADD_F16
        return tl.inline_asm_elementwise(code, "=r,r,r", [x, y], tl.int32, True, 1)
    return _pack(
        first_of(x, dtype) + first_of(y, dtype), second_of(x, dtype) + second_of(y, dtype), dtype
    )


@triton.jit
def code_pairs(word, magic, place: tl.constexpr, PTX: tl.constexpr):
    """The codes at bits `place` and `place` + 16 as mantissas of the two floats of `magic`."""
    moved = word >> place
    if PTX:
        return tl.inline_asm_elementwise(_MASK_OR, "=r,r,r", [moved, magic], tl.int32, True, 1)
    return (moved & 0x000F000F) | magic


@triton.jit
def _rows_by_columns(a, b, dtype: tl.constexpr):
    """Sums over the two inputs of four lanes each: [warps, 8 rows, 8 columns]."""
    WARPS: tl.constexpr = a.shape[0] // 32
    rows_first = tl.reshape(first_of(a, dtype), [WARPS, 8, 1, 4])
    rows_second = tl.reshape(second_of(a, dtype), [WARPS, 8, 1, 4])
    columns_first = tl.reshape(first_of(b, dtype), [WARPS, 1, 8, 4])
    columns_second = tl.reshape(second_of(b, dtype), [WARPS, 1, 8, 4])
    return tl.sum(rows_first * columns_first + rows_second * columns_second, axis=3)


@triton.jit
def _of_lanes(sums):
    """[warps, 8 rows, 8 columns] as two values of each thread: columns 2 t and 2 t + 1."""
    WARPS: tl.constexpr = sums.shape[0]
    even, odd = tl.split(tl.reshape(sums, [WARPS, 8, 4, 2]))
    return tl.reshape(even, [32 * WARPS]), tl.reshape(odd, [32 * WARPS])


@triton.jit
def four_of(values, at: tl.constexpr):
    """The four values of one step among those of several."""
    return values[4 * at], values[4 * at + 1], values[4 * at + 2], values[4 * at + 3]


@triton.jit
def multiply_add(a, b, c, dtype: tl.constexpr, PTX: tl.constexpr):
    """`c` + a · b: 16 rows by 8 columns over 16 inputs; see the top of the file."""
    if PTX:
        code: tl.constexpr = _BF16 if dtype == tl.bfloat16 else _F16
        return tl.inline_asm_elementwise(
            code,
            "=f,=f,=f,=f,r,r,r,r,l,f,f,f,f",
            [a[0], a[1], a[2], a[3], b, c[0], c[1], c[2], c[3]],
            (tl.float32, tl.float32, tl.float32, tl.float32),
            True,
            1,
        )
    low, high = pairs_of(b)
    upper = _rows_by_columns(a[0], low, dtype) + _rows_by_columns(a[2], high, dtype)
    lower = _rows_by_columns(a[1], low, dtype) + _rows_by_columns(a[3], high, dtype)
    c0, c1 = _of_lanes(upper)
    c2, c3 = _of_lanes(lower)
    return c[0] + c0, c[1] + c1, c[2] + c2, c[3] + c3
