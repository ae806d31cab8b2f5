"""The file formats of quantized checkpoints: how each is recognised, read and written.

A format turns the tensors of one linear into a weight of `packed` and back; no code outside this
package knows which one it was. Layouts, for a linear of `out` × `in` in groups of g:

- compressed-tensors (its package, `compressors/pack_quantized` and `naive_quantized`, 0.20):
  `weight_packed` int32 [out, in/8], nibble i of a word is column 8j + i, stored as value + 8;
  `weight_scale` [out, in/g]; `weight_zero_point` int32 [out/8, in/g], packed along the output;
  `weight_shape` int64 [2]; `weight_g_idx` int32 [in]. 8 bits: [out, in/4], stored as value + 128.
  fp8 (`float-quantized`): `weight` e4m3 [out, in], `weight_scale` [out, 1] or per block.
- AWQ (AutoAWQ 0.2, `gemm`): `qweight` int32 [in, out/8] and `qzeros` [in/g, out/8], in which
  nibble i of a word is column 8j + (0, 2, 4, 6, 1, 3, 5, 7)[i]; `scales` float16 [in/g, out].
- GPTQ (AutoGPTQ, GPTQModel): `qweight` int32 [in/8, out], packed along the input; `qzeros`
  [in/g, out/8]; `scales` [in/g, out]; `g_idx` int32 [in], the group of each input feature. The
  first version of the format stores zero - 1, `gptq_v2` the zero itself.
- MXFP4 (compressed-tensors `mxfp4-pack-quantized`): `weight_packed` uint8 [out, in/2], the first
  of two columns in the low half; `weight_scale` uint8 [out, in/32], the exponent + 127.
- MXFP4 (gpt-oss): `blocks` uint8 [out, in/32, 16] and `scales` uint8 [out, in/32], as above.
- fp8 (the hub's DeepSeek and Qwen3 checkpoints): `weight` e4m3 and `weight_scale_inv` per block,
  or a single `weight_scale`.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.packed.weight import PackedWeight
    from localllm_kernels.compiling.traits import WeightLayout

# A test checks it.
RESIDENT_SHARE = 1.15
SCALE_DTYPES = ("F16", "BF16", "F32")
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """What a file must hold under one suffix: the accepted shapes and dtypes."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False


@dataclass(frozen=True, slots=True)
class Scheme(ABC):
    """How one linear is quantized in one format; the suffix `marker` marks it as quantized."""

    marker: str

    @property
    def resident_share(self) -> float:
        """Upper bound on loaded over stored bytes: zeros are unpacked, codes repacked."""
        return RESIDENT_SHARE

    @property
    def read_share(self) -> float:
        """Bytes that a product reads over stored ones."""
        return 1.0

    def takes(self, dtype: str) -> bool:
        """Whether the tensor that marks it may have this dtype."""
        return True

    @abstractmethod
    def stored(self, width_out: int, width_in: int) -> dict[str, StoredTensor]:
        """The tensors of a linear of that shape, by suffix. Raises: ValueError if it has none."""

    @abstractmethod
    def layout(self, width_in: int) -> "WeightLayout":
        """The layout of a linear with `width_in` inputs, which decides its kernels."""

    @abstractmethod
    def read(self, tensors: "Mapping[str, Tensor]") -> "PackedWeight":
        """The weight from its tensors, by suffix. Raises: ValueError if they are inconsistent."""

    @abstractmethod
    def write(self, weight: Any) -> "dict[str, Tensor]":
        """The tensors of a weight, by suffix: the inverse of `read`."""


def count_groups(width_in: int, group_size: int | None) -> int:
    """Scales per row; one if `group_size` is None. Raises: ValueError if it does not divide."""
    size = group_size or width_in
    if width_in % size:
        raise ValueError(f"its input width {width_in} is not a multiple of the group size {size}")
    return width_in // size


def check_multiple(name: str, width: int, factor: int) -> None:
    """Raises: ValueError if `width` is not a multiple of `factor`; `name`: "input" or "output"."""
    if width % factor:
        raise ValueError(f"its {name} width {width} is not a multiple of {factor}")
