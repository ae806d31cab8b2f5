"""The logarithm of a size that is a power of two, known when a kernel is compiled."""

import triton


@triton.constexpr_function
def log2(count):
    """Of a power of two."""
    return count.bit_length() - 1
