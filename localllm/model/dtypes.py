"""The number formats that a user can choose for a model."""

from collections.abc import Mapping
from typing import Literal

DType = Literal["float32", "bfloat16", "float16"]
# With their other names in torch.
DTYPES: Mapping[DType, tuple[str, ...]] = {
    "float32": ("float",),
    "bfloat16": (),
    "float16": ("half",),
}
# Of the matrices of recurrences; see RecurrentState in blocks/block.py.
StateDType = Literal["float32", "float16"]
STATE_DTYPES: tuple[StateDType, ...] = ("float32", "float16")
