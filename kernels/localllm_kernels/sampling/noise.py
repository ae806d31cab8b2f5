"""What the sampling kernels share: the order of floats, and the noise of `gumbel_argmax.py`."""

import triton
import triton.language as tl


@triton.jit
def ordered(values):
    """Integers in the order of the floats; both zeros become the same integer."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mix32(bits):
    """The hash of gumbel_argmax.py; uint32."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def gumbel(key, ids):
    """The noise of gumbel_argmax.py in float32; `key`: int64. Above one half, u is kept as 1 - w,
    since a float near one has no digits left (log(1 - w) as in Kahan's log1p).
    """
    key_low, key_high = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    bits = _mix32(_mix32(ids.to(tl.uint32) * 0x9E3779B1 + key_low) ^ key_high)
    unit = 2.3283064365386963e-10  # 2^-32
    u = (bits.to(tl.float32) + 0.5) * unit
    w = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * unit
    is_high = (bits >> 31) != 0
    rest = 1.0 - w
    taken = rest - 1.0
    log_rest = tl.log(tl.where(is_high, rest, u))
    is_tiny = taken == 0.0
    high = tl.where(is_tiny, -w, log_rest * (-w) / tl.where(is_tiny, 1.0, taken))
    return -tl.log(-tl.where(is_high, high, log_rest))


@triton.jit
def winner(values, places, none):
    """The greatest value and the first place that has it; `none`: a place after all others."""
    most = tl.max(values, axis=0)
    return most, tl.min(tl.where(values == most, places, none), axis=0)
