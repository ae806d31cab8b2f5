"""A layer: blocks that read the residual stream behind a norm, and are added to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from localllm.model.blocks.block import Block, BlockSpec, KVState, Parts
from localllm.model.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Place:
    """A block's place in a layer, behind the norm whose weight is called `norm`."""

    norm: str
    block: BlockSpec


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """How a layer's blocks stand in the residual stream, one after the other."""

    places: tuple[Place, ...]
    hidden_size: int
    eps: float

    @property
    def state(self) -> KVState | None:
        """What the layer remembers: that of the one block that remembers something."""
        return next((p.block.state for p in self.places if p.block.state is not None), None)

    @property
    def workspace(self) -> int:
        """Values that its blocks hold for a token."""
        return sum(place.block.workspace for place in self.places)

    def linears(self) -> Iterator[tuple[str, tuple[int, int], bool]]:
        """Its linears: name in the layer, (width out, width in), and whether with a bias."""
        for place in self.places:
            for group in place.block.products:
                for name, width_out in group.linears:
                    yield name, (width_out, group.width_in), group.has_bias

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """The shapes of its tensors in a checkpoint that is not quantized, by name in the layer."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape, has_bias in self.linears():
            shapes[f"{name}.weight"] = shape
            if has_bias:
                shapes[f"{name}.bias"] = shape[:1]
        for place in self.places:
            shapes |= {name: (width,) for name, width in place.block.vectors.items()}
            shapes[f"{place.norm}.weight"] = (self.hidden_size,)
        return shapes

    def build(self, parts: Parts) -> Layer:
        """The layer with its weights."""
        return Layer(
            tuple(
                Sublayer(
                    place.block,
                    RMSNorm(parts.vector(f"{place.norm}.weight"), self.eps),
                    place.block.build(parts),
                )
                for place in self.places
            )
        )


@dataclass(frozen=True, slots=True)
class Sublayer:
    """A block with the norm before it, and its sizes."""

    spec: BlockSpec
    norm: RMSNorm
    block: Block


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer with its weights."""

    sublayers: tuple[Sublayer, ...]
