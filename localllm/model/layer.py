"""A layer: blocks that read the normed residual stream and add their output to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.model.blocks.block import (
    Block,
    BlockInputs,
    BlockSpec,
    KVState,
    Parts,
    RecurrentState,
)
from localllm.model.norm import Norm, NormSpec

if TYPE_CHECKING:
    from torch import Tensor

    from localllm_kernels import Ops


@dataclass(frozen=True, slots=True)
class Place:
    """A block in a layer:

        residual = factor · (residual + scale · after(block(norm(residual))))

    `norm`, `after`: None where there is no such norm; `shares_input`: the next block reads the same
    normed rows as this one, so that both compute in parallel; `factor`: the name of a tensor of one
    value in the layer, None for 1.
    """

    norm: NormSpec | None
    block: BlockSpec
    after: NormSpec | None = None
    scale: float = 1.0
    shares_input: bool = False
    factor: str | None = None

    @property
    def norms(self) -> tuple[NormSpec, ...]:
        """Its norms on the residual stream's width."""
        return tuple(norm for norm in (self.norm, self.after) if norm is not None)

    @property
    def is_plain(self) -> bool:
        """Whether the block's output is added as it is, and read by the next one after a norm."""
        is_behind_norm = self.norm is not None and not self.norm.is_centred
        is_added_as_it_is = self.after is None and self.scale == 1 and self.factor is None
        return is_behind_norm and is_added_as_it_is and not self.shares_input


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """The blocks of a layer, in order, without their weights."""

    places: tuple[Place, ...]
    hidden_size: int

    @property
    def state(self) -> KVState | None:
        """The state of the one block that keeps state, None if no block does."""
        return next((p.block.state for p in self.places if p.block.state is not None), None)

    @property
    def reads(self) -> int | None:
        """The layer whose state is read in place of its own, None if there is none."""
        return next((p.block.reads for p in self.places if p.block.reads is not None), None)

    @property
    def recurrence(self) -> RecurrentState | None:
        """What the one block that is a recurrence keeps, None if there is none."""
        kept = (place.block.recurrence for place in self.places)
        return next((each for each in kept if each is not None), None)

    @property
    def workspace(self) -> int:
        """Values per token that its blocks hold."""
        return sum(place.block.workspace for place in self.places)

    def linears(self) -> Iterator[tuple[str, tuple[int, int], bool]]:
        """Its linears: name in the layer, (width out, width in), and whether it has a bias."""
        for place in self.places:
            for group in place.block.products:
                for name, width_out in group.linears:
                    yield name, (width_out, group.width_in), group.has_bias

    def quantized(self) -> list[str]:
        """The linears that `quantize` changes, by name in the layer."""
        groups = (group for place in self.places for group in place.block.products)
        return [name for group in groups if not group.is_kept for name in group.names]

    def vectors(self) -> list[str]:
        """The vectors of its blocks, by name in the layer."""
        return [name for place in self.places for name in place.block.vectors]

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors in an unquantized checkpoint, by name in the layer."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape, has_bias in self.linears():
            shapes[f"{name}.weight"] = shape
            if has_bias:
                shapes[f"{name}.bias"] = shape[:1]
        for place in self.places:
            shapes |= place.block.vectors
            shapes |= {f"{norm.name}.weight": (self.hidden_size,) for norm in place.norms}
            if place.factor is not None:
                shapes[place.factor] = (1,)
        return shapes

    def build(self, parts: Parts) -> Layer:
        """The layer with its weights."""

        def norm(spec: NormSpec | None) -> Norm | None:
            return None if spec is None else spec.with_weight(parts.vector(f"{spec.name}.weight"))

        def sublayer(place: Place) -> Sublayer:
            factor = 1.0 if place.factor is None else parts.vector(place.factor).item()
            block = place.block.build(parts)
            return Sublayer(place, norm(place.norm), block, norm(place.after), factor)

        return Layer(tuple(sublayer(place) for place in self.places))


@dataclass(frozen=True, slots=True)
class Sublayer:
    """A block with its weights and norms, and its place."""

    place: Place
    norm: Norm | None
    block: Block
    after: Norm | None
    factor: float = 1.0

    def output(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """What is added to the residual stream; `x`: the block's input, [num_tokens, hidden]."""
        return self.finish(self.block(x, inputs), inputs.ops)

    def finish(self, x: Tensor, ops: Ops) -> Tensor:
        """What is added to the residual stream, of the block's own output."""
        if self.after is not None:
            x = self.after(x, ops)
        return x if self.place.scale == 1 else x * self.place.scale


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with its weights."""

    sublayers: tuple[Sublayer, ...]
