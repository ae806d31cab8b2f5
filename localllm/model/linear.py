"""Matrix products with weights, plain and quantized."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.packed.weight import PackedWeight
from localllm_kernels.linears import CodedWeight, ExpertsProduct, Linears

# `x`: [num_tokens, in] -> [num_tokens, out].
Projection = Callable[[Tensor], Tensor]

# Few enough that a product on a GPU is still bound by memory.
FIXED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Linear:
    """`x · weightᵀ + bias`; weight: [out, in]."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class FixedRows:
    """A product that always gets the same number of rows, padded or in parts.

    So the result of a row cannot depend on how many rows there are.
    """

    product: Projection

    def __call__(self, x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -num_rows % FIXED_ROWS))
        parts = torch.split(padded, FIXED_ROWS)
        return torch.cat([self.product(part) for part in parts])[:num_rows]


@dataclass(frozen=True, slots=True)
class SplitLinear:
    """Products of the same input that cannot be fused; their outputs are concatenated."""

    parts: tuple[Projection, ...]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], dim=-1)


@dataclass(frozen=True, slots=True)
class OrderedOutputs:
    """A product whose outputs are put into another order."""

    product: Projection
    order: Tensor  # int64 [out]

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x)[:, self.order]


@dataclass(frozen=True, slots=True)
class OrderedInputs:
    """A product whose inputs are put into another order."""

    product: Projection
    order: Tensor  # int64 [in]

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x[:, self.order])


@dataclass(frozen=True, slots=True)
class HeadByHead:
    """A product for each head, one after another; heads are side by side in `x` and the result."""

    products: tuple[Projection, ...]

    def __call__(self, x: Tensor) -> Tensor:
        parts = x.view(len(x), len(self.products), -1).unbind(1)
        pairs = zip(self.products, parts, strict=True)
        return torch.cat([product(part.contiguous()) for product, part in pairs], dim=-1)


@dataclass(frozen=True, slots=True)
class HeadsTogether:
    """The same as one batched product, which depends on the number of rows; see FixedRows."""

    weights: Tensor  # [num_heads, in, out]

    def __call__(self, x: Tensor) -> Tensor:
        parts = x.view(len(x), len(self.weights), -1).transpose(0, 1)
        return torch.bmm(parts, self.weights).transpose(0, 1).flatten(1)


@dataclass(frozen=True, slots=True)
class ExpertByExpert(ExpertsProduct):
    """A mixture of experts, one expert after another.

    A row's outputs are added up in the order in which its experts were chosen, so that its sum does
    not depend on other rows. `row_unit`: see Traits.
    """

    gate_up: tuple[Projection, ...]
    down: tuple[Projection, ...]
    row_unit: int = 1

    @property
    def each(self) -> tuple[Projection, ...]:
        return *self.gate_up, *self.down

    def __call__(
        self, x: Tensor, chosen: Tensor, factors: Tensor, gate: Callable[[Tensor], Tensor]
    ) -> Tensor:
        top_k, flat = chosen.shape[1], chosen.flatten()
        outputs = x.new_empty(len(flat), x.shape[1])
        for number in sorted(set(flat.tolist())):
            [pairs] = (flat == number).nonzero(as_tuple=True)
            rows = F.pad(x[pairs // top_k], (0, 0, 0, -len(pairs) % self.row_unit))
            outputs[pairs] = self.down[number](gate(self.gate_up[number](rows)))[: len(pairs)]
        parts = outputs.view(len(x), top_k, -1) * factors[:, :, None].to(x.dtype)
        total = parts[:, 0]
        for place in range(1, top_k):
            total = total + parts[:, place]
        return total


@dataclass(frozen=True, slots=True)
class DequantizedLinear:
    """A product that dequantizes its weight on every call, since no kernel multiplies with it.

    `plain`: the product with a dequantized weight.
    """

    weight: PackedWeight
    bias: Tensor | None
    dtype: torch.dtype
    plain: Callable[[Tensor, Tensor | None], Projection]

    def __call__(self, x: Tensor) -> Tensor:
        return self.plain(self.weight.dequantize(self.dtype), self.bias)(x)


def packed_linear(
    weight: PackedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    linears: Linears | None = None,
    *,
    is_in_place: bool = False,
) -> Projection:
    """The fastest product for `weight`, already on its device, in a model of `dtype`.

    It uses the kernels of `linears` if given, else torch's. In float32 the weight is dequantized
    and nothing else is rounded. `is_in_place`: see CodedWeight.
    """
    if linears is None:
        return weight.torch_product(bias, dtype) or DequantizedLinear(weight, bias, dtype, Linear)
    coded = weight.coded()
    if is_in_place and isinstance(coded, CodedWeight):
        coded = replace(coded, is_in_place=True)
    own = linears.packed(coded, bias, dtype)
    return own or DequantizedLinear(weight, bias, dtype, linears.plain)


def fuse(parts: Sequence[PackedWeight]) -> PackedWeight | None:
    """One weight with the rows of all parts, None if they cannot be fused."""
    for part, following in pairwise(parts):
        if not part.fuses_with(following):
            return None
    return parts[0] if len(parts) == 1 else type(parts[0]).stack(parts)
