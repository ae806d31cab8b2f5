"""The windows of weights on a trellis, see trellis.py.

A row is the bytes of a file behind a byte of zeros, in which the state before its first weight
ends.
"""

import triton
import triton.language as tl


@triton.jit
def windows_from(row_ptr, is_row, start, width_in, COUNT: tl.constexpr):
    """The 7 newest bits of `COUNT` inputs from `start` on, a multiple of 8: int32 [rows, COUNT].
    `row_ptr`: [rows], the first bytes of each.
    """
    eights = start // 8 + tl.arange(0, COUNT // 8)
    mask = is_row[:, None] & (8 * eights < width_in)[None, :]
    at = row_ptr[:, None] + 3 * eights[None, :]
    word = tl.load(at, mask=mask, other=0).to(tl.int32)
    for byte in tl.static_range(1, 4):
        word |= tl.load(at + byte, mask=mask, other=0).to(tl.int32) << 8 * byte
    windows = word >> 4
    windows = tl.join(windows, windows >> 12)
    windows = tl.join(windows, windows >> 6)
    windows = tl.join(windows, windows >> 3)
    return tl.reshape(windows & 127, [row_ptr.shape[0], COUNT])
