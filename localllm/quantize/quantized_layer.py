"""What quantizing a layer gives."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from localllm.model.packed.weight import PackedWeight


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """A quantized layer: weights by linear, all other tensors by name, and the errors.

    `errors`: for each linear, the squared error of its output over its squared output, or of its
    weight where it saw too few rows; `rows`: the rows that an expert saw, by its last linear.
    """

    weights: Mapping[str, PackedWeight]
    plain: dict[str, Tensor]
    errors: dict[str, float]
    rows: dict[str, int] = field(default_factory=dict)
