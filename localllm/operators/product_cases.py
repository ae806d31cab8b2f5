"""Products with weights: those of a model, alone and fused with the operators around them; with
random weights of a kind; and mixtures of experts. See `case.py`.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor

from localllm.model.architecture import HEAD
from localllm.model.blocks.block import InputsFrom, LinearGroup
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.linear import ExpertByExpert, Linear, Projection, packed_linear
from localllm.model.norm import Norm
from localllm.model.packed.blocks import BlockWeight
from localllm.model.packed.table import PACKED_TYPES, Shape
from localllm.model.packed.weight import PackedWeight, widest
from localllm.model.weights import WeightReader, WeightSource
from localllm.operators.case import Cost, OperatorCase, Setting, distance
from localllm_kernels import TORCH_OPS, Ops
from localllm_kernels.attention.kv_cache import dequantize_rows, quantize_rows
from localllm_kernels.compiling.choice import Piece
from localllm_kernels.compiling.launch import Workspace
from localllm_kernels.experts.gpu_experts import StackedProduct
from localllm_kernels.linears import ExpertsProduct
from localllm_kernels.products.fp8_matmul import rounds_inputs
from localllm_kernels.products.gpu_linears import Int4Product
from localllm_kernels.products.int4_matmul import MAX_TILE_ROWS
from localllm_kernels.products.int4_weight import NOTHING, Around
from localllm_kernels.products.nvfp4_matmul import multiplies_nvfp4, rounded_to_nvfp4

# Each takes a different path: one row, a tile, the largest tile, and the library.
ROWS = (1, 16, MAX_TILE_ROWS, 512)
# By pair, and in tasks of few and of many pairs.
EXPERT_ROWS = (1, 16, 512)
# Experts that a case has, at least as many as a row takes.
_EXPERTS = 8
FRAGMENT_ROWS = (1, 8, 16, 32, MAX_TILE_ROWS)
PLAIN = "bf16"  # the kind of weights that are not quantized
# A product with rows, and with the operators fused around it.
_Compute = Callable[[Tensor, Around], Tensor]


@dataclass(frozen=True, slots=True)
class Product:
    """A product with one weight, in three ways: that to be checked, its alternative, and the exact
    one, of rows in float32.

    `piece`: None for a plain weight; `kind`, `shape`: of the weight, (out, in); `num_bytes`: of it
    as it is stored; `input_scale`: see CodedWeight.
    """

    piece: Piece | None
    name: str
    kind: str
    shape: Shape
    num_bytes: int
    own: _Compute
    plain: _Compute
    exact: _Compute
    input_scale: Tensor | None = None

    def case(self, on: Setting, rows: int, around: Around = NOTHING) -> OperatorCase:
        """The product with `rows` random rows."""
        x = on.values(rows, self.shape[1])
        plain_x = x.to(on.sizes.dtype)

        def away() -> float:
            wide, scale = x.float(), self.input_scale
            if self.piece is Piece.FP8 and rounds_inputs(on.device):
                if scale is None:
                    wide = dequantize_rows(*quantize_rows(x, torch.float8_e4m3fn))
                else:
                    steps = (wide / scale).clamp(-448, 448)
                    wide = steps.to(torch.float8_e4m3fn).float() * scale
            elif (
                self.piece is Piece.NVFP4
                and scale is not None
                and multiplies_nvfp4(Workspace(on.device))
            ):
                wide = rounded_to_nvfp4(wide, scale)
            return distance(self.own(x, around), self.exact(wide, _widened(around)), on.unit)

        return OperatorCase(
            self.piece,
            self.name + ("" if around is NOTHING else " fused with norm, gate or residual"),
            rows,
            lambda: self.own(x, around),
            lambda: self.plain(plain_x, around),
            away,
            Cost(
                self.num_bytes + (x.numel() + rows * self.shape[0]) * x.itemsize,
                2 * rows * prod(self.shape),
                on.own.traits.arithmetic(self.kind, on.sizes.dtype),
            ),
        )


def drawn_product(on: Setting, kind: str, shape: Shape) -> Product:
    """A product with a random weight, and torch's with the same weight as plain numbers."""
    dtype, linears = on.sizes.dtype, on.own.linears
    if kind == PLAIN:
        piece, values = None, torch.randn(shape, device=on.device) * shape[1] ** -0.5
        plain = values.bfloat16().to(dtype)
        exact: Callable[[], Tensor] = plain.float
        own = Linear(plain) if linears is None else linears.plain(plain, None)
    else:
        packed = PACKED_TYPES[kind]
        weight = packed.draw(shape, torch.Generator(on.device).manual_seed(0))
        piece, plain = packed.piece, weight.dequantize(dtype)
        exact = lambda: weight.dequantize(torch.float)  # noqa: E731
        own = packed_linear(weight, None, dtype, linears)
    return Product(
        piece,
        kind,
        kind,
        shape,
        _stored_bytes(kind, shape),
        computing(own),
        computing(Linear(plain)),
        lambda x, around: computing(Linear(exact()))(x, around),
    )


def product_cases(on: Setting, second: Setting, source: WeightSource) -> Iterator[OperatorCase]:
    """Every kind of product in the first layer that has it, and the head, in every way in which
    they are computed; the tensors of one are freed before the next. `second`: products by
    fragments, and those of `on` as their alternative.

    Raises: as `WeightReader`.
    """
    seen, architecture = set[LinearGroup](), on.sizes.architecture
    for layer, group in architecture.groups():
        if group not in seen and group.copy == 0 and not group.is_dense:
            seen.add(group)
            yield from _of_group(
                on, second, source, [f"{layer}.{name}" for name in group.names], group
            )
    hidden, vocab = architecture.hidden_size, architecture.vocab_size
    head = LinearGroup("head", ((HEAD, vocab),), hidden, inputs=InputsFrom.OTHER)
    yield from _of_group(on, second, source, [HEAD], head)
    mixtures = set[ExpertsSpec]()
    for layer, spec in architecture.experts():
        if spec not in mixtures:
            mixtures.add(spec)
            yield from _of_experts(on, source, layer, spec)


def _of_group(
    on: Setting, second: Setting, source: WeightSource, names: Sequence[str], group: LinearGroup
) -> Iterator[OperatorCase]:
    """No case if nothing is quantized; for a 4-bit weight both ways, alone and fused.

    The weight is read once for each way: reading it from disk takes longer than all the rest.
    """
    quantized = [name for name in names if source.has_quantized(name)]
    if not quantized:
        return
    weight, dtype = source.quantized(quantized[0], on.device), on.sizes.dtype

    def read(ops: Ops, dtype: torch.dtype = dtype) -> Projection:
        return WeightReader(source, dtype, on.device, ops).linear(*names)

    own, shape = read(on.own), (group.width_out, group.width_in)
    ways = (own, read(on.rival), read(TORCH_OPS, torch.float))
    piece, num_bytes = _piece_of(weight, own), _bytes_of(source, quantized, shape, on)
    scale = getattr(weight, "input_scale", None)
    if scale is not None:
        weights = (source.quantized(name, on.device) for name in quantized)
        scale = widest([getattr(each, "input_scale", None) for each in weights])
    of_own, of_rival, of_exact = map(computing, ways)
    product = Product(
        piece, group.kind, weight.kind, shape, num_bytes, of_own, of_rival, of_exact, scale
    )

    def arounds(rows: int) -> Iterator[Around]:
        """Alone, and with what a layer in few launches computes with it."""
        yield NOTHING
        architecture = on.sizes.architecture
        hidden = architecture.hidden_size
        norm = Norm(on.norm_weight(hidden, is_wide=False), architecture.norm.eps)
        found = around(group, norm, on.values(rows, hidden))
        if isinstance(own, Int4Product) and rows <= MAX_TILE_ROWS and found is not NOTHING:
            yield found

    for rows in ROWS:
        for each in arounds(rows):
            yield product.case(on, rows, each)
    has_fragments = isinstance(own, Int4Product) and own.weight.permutation is None
    if not has_fragments or dtype == torch.float32:
        return
    fragments = computing(read(second.own))
    product = replace(product, piece=Piece.FRAGMENTS, own=fragments, plain=product.own)
    for rows in FRAGMENT_ROWS:
        for each in arounds(rows):
            yield product.case(second, rows, each)


def _of_experts(
    on: Setting, source: WeightSource, layer: str, spec: ExpertsSpec
) -> Iterator[OperatorCase]:
    """A mixture with the first experts of a layer: by pair, and in tasks."""
    top_k, expert = spec.router.top_k, spec.expert
    count = min(spec.router.num_experts, max(_EXPERTS, top_k))
    groups = [spec.expert_at(number).products for number in range(count)]
    gate_up, down = (
        [[f"{layer}.{name}" for name in group.names] for group in part]
        for part in zip(*groups, strict=True)
    )

    def read(ops: Ops, dtype: torch.dtype) -> ExpertsProduct:
        return WeightReader(source, dtype, on.device, ops).experts(gate_up, down, expert.gate)

    own = read(on.own, on.sizes.dtype)
    if isinstance(own, ExpertByExpert):
        return
    plain, exact = read(on.rival, on.sizes.dtype), read(TORCH_OPS, torch.float32)
    shapes = [(group.width_out, group.width_in) for group in groups[0]]

    expert_bytes = sum(
        _bytes_of(source, part[0], shape, on)
        for part, shape in zip((gate_up, down), shapes, strict=True)
    )

    def gate(inner: Tensor) -> Tensor:
        return TORCH_OPS.gate(inner, expert.gate)

    for rows in EXPERT_ROWS:
        chosen = torch.rand(rows, count, device=on.device).argsort(-1)[:, :top_k].int()
        factors = torch.rand(chosen.shape, device=on.device)
        x = on.values(rows, expert.hidden_size)
        read_bytes = len(set(chosen.flatten().tolist())) * expert_bytes
        yield OperatorCase(
            Piece.EXPERTS,
            f"{top_k} of {count} experts",
            rows,
            partial(own, x, chosen, factors, gate),
            partial(plain, x, chosen, factors, gate),
            partial(_away, on, own, exact, (x, chosen, factors, gate)),
            Cost(read_bytes + 2 * x.nbytes, 2 * chosen.numel() * sum(map(prod, shapes)), "bf16"),
        )


def _away(
    on: Setting, own: ExpertsProduct, exact: ExpertsProduct, inputs: tuple[Any, ...]
) -> float:
    x, *rest = inputs
    return distance(own(x, *rest), exact(x.float(), *rest), on.unit)


def around(group: LinearGroup, norm: Norm | None, residual: Tensor) -> Around:
    """What a layer in few launches computes with a product: a block's first product reads a norm's
    output, and its last one is added to the residual.
    """
    if group.inputs is InputsFrom.BLOCK:
        if norm is None:
            return NOTHING
        return Around(norm=norm.weight, eps=norm.eps, is_gated=group.is_gated)
    return Around(residual=residual) if group.width_out == residual.shape[1] else NOTHING


def computing(product: Projection) -> _Compute:
    """A product with the operators around it, in one launch if it can; else they are torch's."""
    if isinstance(product, Int4Product):
        return product

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


def _stored_bytes(kind: str, shape: Shape) -> int:
    return 2 * prod(shape) if kind == PLAIN else PACKED_TYPES[kind].stored_bytes(shape)


def _piece_of(weight: PackedWeight, own: Projection) -> Piece:
    """Of a product that begins with `weight`: blocks may have become a weight of another kind."""
    if weight.kind != "blocks":
        return PACKED_TYPES[weight.kind].piece
    if isinstance(own, Int4Product):
        return Piece.INT4
    return Piece.MXFP4 if isinstance(own, StackedProduct) else Piece.BLOCKS


def _bytes_of(source: WeightSource, names: Sequence[str], shape: Shape, on: Setting) -> int:
    """Stored bytes of linears that become one of a shape."""
    if not source.has_quantized(names[0]):
        return _stored_bytes(PLAIN, shape)
    first = source.quantized(names[0], on.device)
    if not isinstance(first, BlockWeight):
        return _stored_bytes(first.kind, shape)
    others = (source.quantized(name, on.device) for name in names[1:] if source.has_quantized(name))
    return first.codes.nbytes + sum(each.codes.nbytes for each in others)
