"""The end of a product: a factor for each output, its bias, and the store."""

import triton
import triton.language as tl


@triton.jit
def store_outputs(
    acc,
    factors_ptr,
    bias_ptr,
    out_ptr,
    rows,
    columns,
    num_rows,
    width_out,
    HAS_BIAS: tl.constexpr,
):
    """`acc`: float32 [rows, columns] -> `out`, [num_rows, width_out]."""
    is_row, is_column = rows < num_rows, columns < width_out
    acc *= tl.load(factors_ptr + columns, mask=is_column, other=0.0)[None, :]
    if HAS_BIAS:
        acc += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    at = rows.to(tl.int64)[:, None] * width_out + columns[None, :]
    mask = is_row[:, None] & is_column[None, :]
    tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask)
