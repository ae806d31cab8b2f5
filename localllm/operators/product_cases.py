"""Cases for products with a model's quantized weights: each kind in its first layer, and the head,
in every way in which they are computed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from localllm.model.architecture import HEAD
from localllm.model.blocks.block import InputsFrom, LinearGroup
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.linear import ExpertByExpert, Projection
from localllm.model.packed.table import PACKED_TYPES
from localllm.model.weights import WeightReader, WeightSource
from localllm.operators.case import OperatorCase, Sizes, distance, unit_of
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.attention.kv_cache import dequantize_rows, quantize_rows
from localllm_kernels.compiling.choice import ALL_OWN, Choice, Piece
from localllm_kernels.linears import ExpertsProduct
from localllm_kernels.products.fp8_matmul import rounds_inputs
from localllm_kernels.products.gpu_linears import Int4Product
from localllm_kernels.products.int4_matmul import MAX_TILE_ROWS
from localllm_kernels.products.int4_weight import NOTHING, Around

# Each takes a different path: one row, a tile, the largest tile, and the library.
ROWS = (1, 16, MAX_TILE_ROWS, 512)
# By pair, and in tasks of few and of many pairs.
EXPERT_ROWS = (1, 16, 512)
# Experts that a case has, at least as many as a row takes.
_EXPERTS = 8
FRAGMENT_ROWS = (1, 8, 16, 32, MAX_TILE_ROWS)
# A product with rows, and with the operators fused around it.
_Compute = Callable[[Tensor, Around], Tensor]


@dataclass(frozen=True, slots=True)
class _Place:
    """A product's place in a model: its linears, its inputs, and what a fused layer computes with
    it.
    """

    what: str
    linears: tuple[str, ...]
    width_in: int
    has_norm: bool = False
    has_gate: bool = False
    has_residual: bool = False

    @classmethod
    def of(cls, layer: str, group: LinearGroup, hidden: int) -> "_Place":
        """A block's first product reads a norm's output; its last is added to the residual, which
        is `hidden` wide.
        """
        return cls(
            group.kind,
            tuple(f"{layer}.{name}" for name in group.names),
            group.width_in,
            has_norm=group.inputs is InputsFrom.BLOCK,
            has_gate=group.is_gated,
            has_residual=group.inputs is not InputsFrom.BLOCK and group.width_out == hidden,
        )


def product_cases(
    source: WeightSource,
    sizes: Sizes,
    device: torch.device,
    tables: Callable[[Choice], Ops],
) -> Iterator[OperatorCase]:
    """Yield every case; the tensors of one place are freed before the next. `tables`: the operators
    by choice.

    Raises: as `WeightReader`.
    """
    products = _Products(source, sizes, device, tables)
    seen, hidden = set[LinearGroup](), sizes.architecture.hidden_size
    for layer, group in sizes.architecture.groups():
        if group not in seen and group.copy == 0 and not group.is_dense:
            seen.add(group)
            yield from products.cases(_Place.of(layer, group, hidden))
    yield from products.cases(_Place("head", (HEAD,), hidden))
    mixtures = set[ExpertsSpec]()
    for layer, spec in sizes.architecture.experts():
        if spec not in mixtures:
            mixtures.add(spec)
            yield from products.of_experts(layer, spec)


@dataclass(frozen=True, slots=True)
class _Products:
    source: WeightSource
    sizes: Sizes
    device: torch.device
    tables: Callable[[Choice], Ops]

    def cases(self, place: _Place) -> Iterator[OperatorCase]:
        """No case if nothing is quantized; for a 4-bit weight both ways, alone and fused.

        The weight is read once for each way: reading it from disk takes longer than all the rest.
        """
        quantized = [name for name in place.linears if self.source.has_quantized(name)]
        if not quantized:
            return
        piece = PACKED_TYPES[self.source.quantized(quantized[0], self.device).kind].piece
        product = self._read(place, self.tables(ALL_OWN))
        plain = _apart(self._read(place, TORCH_OPS))
        exact = _apart(self._read(place, TORCH_OPS, torch.float32))
        takes_around = isinstance(product, Int4Product)
        own = _together(product) if takes_around else _apart(product)
        for rows in ROWS:
            yield self._case(piece, place, rows, (own, plain, exact))
            if takes_around and rows <= MAX_TILE_ROWS:
                yield self._case(piece, place, rows, (own, plain, exact), is_fused=True)
        has_fragments = isinstance(product, Int4Product) and product.weight.permutation is None
        if not has_fragments or self.sizes.dtype == torch.float32:
            return
        choice = Choice(fragment_rows=range(1, MAX_TILE_ROWS + 1))
        ways = _together(self._read(place, self.tables(choice))), own, exact
        for rows in FRAGMENT_ROWS:
            for is_fused in (False, True):
                yield self._case(Piece.FRAGMENTS, place, rows, ways, is_fused=is_fused)

    def of_experts(self, layer: str, spec: ExpertsSpec) -> Iterator[OperatorCase]:
        """A mixture with the first experts of a layer: by pair, and in tasks."""
        count = min(spec.router.num_experts, max(_EXPERTS, spec.router.top_k))
        groups = [spec.expert_at(number).products for number in range(count)]
        gate_up, down = (
            [[f"{layer}.{name}" for name in group.names] for group in part]
            for part in zip(*groups, strict=True)
        )

        def read(ops: Ops, dtype: torch.dtype) -> ExpertsProduct:
            reader = WeightReader(self.source, dtype, self.device, ops)
            return reader.experts(gate_up, down, spec.expert.gate)

        own = read(self.tables(ALL_OWN), self.sizes.dtype)
        if isinstance(own, ExpertByExpert):
            return
        plain, exact = read(TORCH_OPS, self.sizes.dtype), read(TORCH_OPS, torch.float32)

        def gate(inner: Tensor) -> Tensor:
            return TORCH_OPS.gate(inner, spec.expert.gate)

        for rows in EXPERT_ROWS:
            drawn = torch.rand(rows, count, device=self.device)
            chosen = drawn.argsort(-1)[:, : spec.router.top_k].int()
            factors = torch.rand(chosen.shape, device=self.device)
            x = torch.randn(rows, spec.expert.hidden_size, device=self.device)
            inputs = x.to(self.sizes.dtype), chosen, factors, gate

            def away(inputs: Any = inputs) -> float:
                right = exact(inputs[0].float(), *inputs[1:])
                return distance(own(*inputs), right, unit_of(self.sizes.dtype))

            yield OperatorCase(
                Piece.EXPERTS,
                f"{spec.router.top_k} of {count} experts",
                rows,
                away,
                partial(own, *inputs),
                partial(plain, *inputs),
            )

    def _case(
        self,
        piece: Piece,
        place: _Place,
        rows: int,
        ways: tuple[_Compute, _Compute, _Compute],
        *,
        is_fused: bool = False,
    ) -> OperatorCase:
        """`ways`: the product that is checked, its alternative, and the exact result."""
        own, rival, exact = ways
        x = torch.randn(rows, place.width_in, device=self.device).to(self.sizes.dtype)
        around = self._around(place, rows) if is_fused else NOTHING

        def away() -> float:
            wide = x.float()
            if piece is Piece.FP8 and rounds_inputs(self.device):
                wide = dequantize_rows(*quantize_rows(x, torch.float8_e4m3fn))
            right = exact(wide, _widened(around))
            return distance(own(x, around), right, unit_of(self.sizes.dtype))

        return OperatorCase(
            piece,
            place.what + (" fused with norm, gate or residual" if is_fused else ""),
            rows,
            away,
            lambda: own(x, around),
            lambda: rival(x, around),
        )

    def _read(self, place: _Place, ops: Ops, dtype: torch.dtype | None = None) -> Projection:
        reader = WeightReader(self.source, dtype or self.sizes.dtype, self.device, ops)
        return reader.linear(*place.linears)

    def _around(self, place: _Place, rows: int) -> Around:
        def drawn(*shape: int) -> Tensor:
            return torch.randn(shape, device=self.device).to(self.sizes.dtype)

        architecture = self.sizes.architecture
        hidden = architecture.hidden_size
        return Around(
            norm=1 + 0.1 * drawn(hidden) if place.has_norm else None,
            eps=architecture.norm.eps,
            is_gated=place.has_gate,
            residual=drawn(rows, hidden) if place.has_residual else None,
        )


def _together(product: Projection) -> _Compute:
    """The fused product, as a layer in few launches computes it."""
    assert isinstance(product, Int4Product)
    return product


def _apart(product: Projection) -> _Compute:
    """The product alone, with torch's operators before and after it."""

    def compute(x: Tensor, around: Around) -> Tensor:
        if around.norm is not None:
            x = TORCH_OPS.rms_norm(x, around.norm, around.eps)
        out = product(x)
        if around.is_gated:
            out = TORCH_OPS.gate(out, "silu")
        return out if around.residual is None else out + around.residual

    return compute


def _widened(around: Around) -> Around:
    return replace(
        around,
        norm=None if around.norm is None else around.norm.float(),
        residual=None if around.residual is None else around.residual.float(),
    )
