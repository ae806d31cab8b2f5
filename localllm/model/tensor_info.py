"""A tensor of a checkpoint as its file's header describes it."""

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

# In a whole checkpoint; the largest known ones have 92,000.
MAX_TENSORS = 100_000
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
    "F8_E8M0": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """`count` rows of matrix `index` of a stored tensor, from `first` on, `step` apart; it is
    transposed before that if `is_transposed`.
    """

    index: int
    first: int
    step: int
    count: int
    is_transposed: bool

    def of(self, matrix: Any) -> Any:
        """The rows of that matrix, a tensor."""
        turned = matrix.T if self.is_transposed else matrix
        return turned[self.first :: self.step][: self.count]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor as its file's header describes it, or a part of it: `shape` is the part's."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    part: Part | None = None

    def read(self, handle: Any) -> Any:
        """The tensor; `handle`: its file, opened by safetensors."""
        if self.part is None:
            return handle.get_tensor(self.name)
        return self.part.of(handle.get_slice(self.name)[self.part.index])

    @property
    def num_bytes(self) -> int:
        """Bytes of its data."""
        return ITEM_BYTES[self.dtype] * prod(self.shape)
