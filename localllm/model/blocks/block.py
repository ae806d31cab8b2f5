"""What a block of a layer is: sizes that tell what it needs, and the same with weights.

A `BlockSpec` answers for memory, planning, benchmarks, tuning and quantization, without a weight
and without torch; `build` makes the `Block` that computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.inputs import ForwardBatch, GroupTables
    from localllm.model.linear import Projection
    from localllm.model.rope import RopeTable
    from localllm.model.rope_config import RopeConfig
    from localllm_kernels import Ops
    from localllm_kernels.kv_cache import KVCache

# Bytes of a row of so many values in the KV cache.
RowBytes = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class InputRows:
    """The linear whose outputs are, factor by factor, the inputs of a product, so that a scale of
    an input can be undone there.

    Inputs are [groups, repeats, width]; the linear's outputs [groups, width].
    """

    linear: str
    groups: int
    repeats: int
    width: int


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears that read the same inputs, and compute as one product.

    `kind`: the product's name in reports; `widths_out`: of each linear by its name in the layer;
    `is_gated`: the first half of the outputs is the gate of the second; `inputs`: None where the
    inputs are those of the block, which a norm gives.
    """

    kind: str
    linears: tuple[tuple[str, int], ...]
    width_in: int
    has_bias: bool = False
    is_gated: bool = False
    inputs: InputRows | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Of its linears, within the layer."""
        return tuple(name for name, _ in self.linears)

    @property
    def width_out(self) -> int:
        """Of the product."""
        return sum(width for _, width in self.linears)


@dataclass(frozen=True, slots=True)
class KVState:
    """What attention remembers of each token: a key and a value of `width` for each head.

    `window`: tokens that a query may look back on, itself included; None: all.
    """

    num_heads: int
    width: int
    window: int | None

    def token_bytes(self, row_bytes: RowBytes) -> int:
        """Bytes that a token takes."""
        return 2 * self.num_heads * row_bytes(self.width)


@dataclass(frozen=True, slots=True)
class Work:
    """What a token costs beside its products: bytes of state that it reads, and operations."""

    state_bytes: int = 0
    operations: int = 0


class Parts(Protocol):
    """The weights that a block is built from, by their names within the layer."""

    def vector(self, name: str) -> Tensor:
        """What is added or multiplied element by element."""

    def linear(self, *names: str) -> Projection:
        """One linear, or several over the same inputs as one product."""

    def rope(self, config: RopeConfig, width: int) -> RopeTable:
        """The table for heads of `width`; the same one for the same arguments."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of the batch's positions, float32 [num_tokens, head_dim / 2]."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """What a block computes with besides its rows; `cache` and `tables`: of its own state, where it
    has one.
    """

    ops: Ops
    batch: ForwardBatch
    rotations: Mapping[RopeTable, Rotation]
    cache: KVCache | None
    tables: GroupTables | None


class Block(Protocol):
    """A block with its weights: rows in, rows out; the last thing it does is a product."""

    @property
    def products(self) -> tuple[Projection, ...]:
        """One for each of the spec's `products`."""

    def inner(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """The inputs of the last product. `x`: [num_tokens, hidden], normed."""

    def __call__(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """`x`: [num_tokens, hidden], normed -> the same shape; writes new state to the cache."""


class BlockSpec(Protocol):
    """A block without its weights. All sizes are of one token."""

    @property
    def products(self) -> tuple[LinearGroup, ...]:
        """Its products, in the order in which they compute."""

    @property
    def vectors(self) -> Mapping[str, int]:
        """The widths of its other tensors, by their names in the layer."""

    @property
    def state(self) -> KVState | None:
        """What it remembers from step to step; None: nothing."""

    @property
    def workspace(self) -> int:
        """Values that it holds while it computes."""

    def gathered_bytes(self, context: int) -> int:
        """Bytes in all, where state is taken out of its blocks before it is read."""

    def work(self, context: int, row_bytes: RowBytes) -> Work:
        """Of the newest of `context` tokens."""

    def launches(self, *, is_fused: bool) -> int:
        """Kernels beside its products; `is_fused`: what can be within a product is."""

    def describe(self) -> str:
        """The sizes that its operators follow from, in words."""

    def build(self, parts: Parts) -> Block:
        """The block with its weights."""
