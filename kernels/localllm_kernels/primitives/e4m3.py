"""8-bit floats with 4 bits of exponent and 3 of mantissa (e4m3), by integer arithmetic.

A code has the bits of a float that is smaller by 2^120, except for zeros between sign and exponent
and after the mantissa; that holds for subnormal codes too. This therefore runs on GPUs without the
type, and in Triton's interpreter. Source: Micikevicius et al. 2022, section 3.
"""

import triton
import triton.language as tl


@triton.jit
def from_e4m3(codes):
    """`codes`: uint8 -> float32. The code of NaN (127) is never written, and reads as 480."""
    bits = codes.to(tl.int32)
    bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.3292279957849159e36  # 2^120


@triton.jit
def to_e4m3(values):
    """`values`: float32 of at most 448 in absolute value -> uint8, rounded half to even."""
    bits = (values * 7.52316384526264e-37).to(tl.int32, bitcast=True)  # 2^-120
    magnitude = bits & 0x7FFFFFFF
    rounded = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)
