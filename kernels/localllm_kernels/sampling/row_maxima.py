"""The greatest value of each row and its index, for greedy sampling and to find bad logits."""

from torch import Tensor


def row_maxima_reference(values: Tensor) -> tuple[Tensor, Tensor]:
    """`values`: float32 [rows, width] -> maxima [rows] and the first index of each, int64 [rows].

    A row that holds a NaN has NaN as its maximum, and an arbitrary index.
    """
    maxima, indices = values.max(dim=1)
    return maxima, indices
