"""Values kept within a cap: cap · tanh(value / cap) (Gemma 2 report, section 2)."""

from torch import Tensor


def capped(values: Tensor, cap: float) -> Tensor:
    """`values` between -`cap` and `cap`; float32, any shape.

    Not torch's tanh, whose vector loop and scalar tail differ in the last bit, so that a value's
    bits would depend on its place in the batch.
    """
    return cap - 2 * cap / (1 + (values * (2 / cap)).exp())
