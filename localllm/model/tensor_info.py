"""A tensor of a checkpoint as its file's header describes it."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# In a whole checkpoint; the largest known ones have 92,000.
MAX_TENSORS = 100_000
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "C64": 8,
}  # fmt: skip
# What torch calls them.
_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "BOOL": "bool",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8", "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """`count` rows of matrix `index` of a stored tensor, from `first` on, `step` apart; it is
    transposed before that if `is_transposed`. `shape`: of a stored matrix.
    """

    shape: tuple[int, ...]
    index: int
    first: int
    step: int
    count: int
    is_transposed: bool

    def of(self, matrix: "Tensor") -> "Tensor":
        """The rows of that matrix, a tensor."""
        turned = matrix.T if self.is_transposed else matrix
        return turned[self.first :: self.step][: self.count]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it, or a part of it: `shape` is the part's.
    `start`: where the bytes of the whole tensor begin in the file.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    part: Part | None = None
    start: int = 0

    def read(self, data: "Tensor") -> "Tensor":
        """The tensor, a view of `data`, which are all bytes of its file."""
        if self.part is None:
            return plain_view(data, self.start, self.dtype, self.shape)
        shape = self.part.shape
        start = self.start + self.part.index * prod(shape) * ITEM_BYTES[self.dtype]
        return self.part.of(plain_view(data, start, self.dtype, shape))

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)

    def has(self, dtype: "torch.dtype") -> bool:
        """Whether its values are of `dtype`, so that they need no copy."""
        return str(dtype) == f"torch.{_DTYPES.get(self.dtype)}"


def plain_view(data: "Tensor", start: int, dtype: str, shape: tuple[int, ...]) -> "Tensor":
    """The values of `dtype` that begin at byte `start` of `data`; a copy where they lie at no
    multiple of their size.
    """
    import torch  # a config is read without it

    item_bytes = ITEM_BYTES[dtype]
    raw = data[start : start + prod(shape) * item_bytes]
    if start % item_bytes:
        raw = raw.clone()
    values: Tensor = raw.view(getattr(torch, _DTYPES[dtype])).view(shape)
    return values
