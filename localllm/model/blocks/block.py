"""The interface of a layer's blocks: a spec with the sizes, and the block with its weights.

A `BlockSpec` answers for memory, planning, benchmarks, tuning and quantization, without weights and
without torch; `build` makes the `Block` that computes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import prod
from typing import TYPE_CHECKING, ClassVar, Protocol

from localllm.model.dtypes import StateDType

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.inputs import ForwardBatch, GroupTables
    from localllm.model.linear import Projection
    from localllm.model.rope import RopeTable, Rotation
    from localllm.model.rope_config import RopeConfig
    from localllm_kernels import Ops
    from localllm_kernels.attention.kv_cache import KVCache
    from localllm_kernels.linears import ExpertsProduct
    from localllm_kernels.pointwise.gate import GateKind
    from localllm_kernels.recurrence.state_cache import StateCache

# From the number of values in a row of the KV cache to its bytes.
RowBytes = Callable[[int], int]


@dataclass(frozen=True, slots=True)
class InputRows:
    """The linear whose outputs are factors of a product's inputs, so that a scale on an input can
    be undone in that linear.

    Inputs are [groups, repeats, width]; the linear's outputs from `first` on [groups, width].
    """

    linear: str
    groups: int
    repeats: int
    width: int
    first: int = 0


class InputsFrom(Enum):
    """Where a product's inputs come from, if not from a linear: they are those of the block, or of
    an operation that cannot undo a scale.
    """

    BLOCK = auto()
    OTHER = auto()


def read_share(share: float, num_rows: int) -> float:
    """The chance that a weight is read that a `share` of the rows needs, of `num_rows` rows."""
    return 1 - (1 - share) ** num_rows


@dataclass(frozen=True, slots=True)
class LinearGroup:
    """Linears that read the same inputs and compute as one product.

    `kind`: the product's name in reports; `linears`: name in the layer and output width of each;
    `is_gated`: the first half of the outputs gates the second; `share`: the part of the rows that
    compute it; `copy`: its number among products that differ in their weights alone; `is_kept`:
    `quantize` leaves it as it is; `is_dense`: a block computes with parts of it, so that a
    quantized one is dequantized as it is loaded.
    """

    kind: str
    linears: tuple[tuple[str, int], ...]
    width_in: int
    has_bias: bool = False
    is_gated: bool = False
    inputs: InputRows | InputsFrom = InputsFrom.BLOCK
    share: float = 1.0
    copy: int = 0
    is_kept: bool = False
    is_dense: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its linears within the layer."""
        return tuple(name for name, _ in self.linears)

    @property
    def width_out(self) -> int:
        """Output width of the product."""
        return sum(width for _, width in self.linears)


@dataclass(frozen=True, slots=True)
class KVState:
    """What attention keeps for each token: a key and a value of `width` for each head.

    `window`: tokens that a query may see, including itself; None: all. `values_are_keys`: what is
    kept as a key is the value too.
    """

    num_heads: int
    width: int
    window: int | None
    values_are_keys: bool = False

    def token_bytes(self, row_bytes: RowBytes) -> int:
        """Bytes per token."""
        return (1 if self.values_are_keys else 2) * self.num_heads * row_bytes(self.width)


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """What a recurrence keeps of all tokens of a request so far: its inputs at the last `num_rows`
    positions, of `width` values each, in float32, and a `matrix` that all inputs have changed, in
    `dtype`.
    """

    num_rows: int
    width: int
    matrix: tuple[int, ...] | None = None
    dtype: StateDType = "float32"

    def num_bytes(self, more_rows: int = 0) -> int:
        """Bytes of one request's state, with room for `more_rows`."""
        size = 0 if self.matrix is None else prod(self.matrix)
        item_bytes = 4 if self.dtype == "float32" else 2
        return 4 * (self.num_rows + more_rows) * self.width + item_bytes * size


@dataclass(frozen=True, slots=True)
class Work:
    """The cost of a token besides its products: bytes of state that it reads, and operations."""

    state_bytes: int = 0
    operations: int = 0


class Parts(Protocol):
    """The weights that a block is built from, by name within the layer."""

    def vector(self, name: str) -> Tensor:
        """A vector that is added or multiplied elementwise."""

    def exact_vector(self, name: str) -> Tensor:
        """A vector in float32, with the values of the files whatever the model's dtype is."""

    def linear(
        self,
        *names: str,
        order: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> Projection:
        """One linear, or several over the same inputs as one product; its rows in `order`. Column i
        is multiplied with value `columns[i]` of its inputs.
        """

    def heads(
        self, name: str, num_heads: int, rows: slice, *, is_transposed: bool = False
    ) -> Projection:
        """A product for each head, with heads side by side in inputs and outputs. Its weight: of
        the rows that a linear without bias has for the head, those in `rows`, or their transpose.
        """

    def experts(
        self, gate_up: Sequence[Sequence[str]], down: Sequence[Sequence[str]], kind: GateKind
    ) -> ExpertsProduct:
        """Both products of all experts, as one, from the linears of each."""

    def rope(self, config: RopeConfig, width: int) -> RopeTable:
        """The table for heads of `width`; the same object for the same arguments."""


@dataclass(frozen=True, slots=True)
class BlockInputs:
    """The inputs of a block besides its rows; `cache` and `tables` are those of the state that it
    keeps or reads, `recurrent` what it keeps as a recurrence, None if there is none. `per_layer`:
    see PerLayerInputs, [num_tokens, width].
    """

    ops: Ops
    batch: ForwardBatch
    rotations: Mapping[RopeTable, Rotation]
    cache: KVCache | None
    tables: GroupTables | None
    per_layer: Tensor | None = None
    recurrent: StateCache | None = None


class Block(ABC):
    """A block with its weights: rows in, rows out."""

    __slots__ = ()

    @property
    @abstractmethod
    def products(self) -> tuple[Projection, ...]:
        """One for each of the spec's `products`."""

    def inner(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """The inputs of the last product, where it gives the outputs. `x`: [num_tokens, hidden],
        normed.
        """
        raise NotImplementedError(f"{type(self).__name__} does not end in a product")

    def __call__(self, x: Tensor, inputs: BlockInputs) -> Tensor:
        """`x`: [num_tokens, hidden], normed -> the same shape; writes new state to the cache."""
        return self.products[-1](self.inner(x, inputs))


class BlockSpec(ABC):
    """A block without its weights. Sizes are per token.

    `ends_in_product`: its last product gives its outputs, so that `Block.inner` has inputs for it.
    """

    __slots__ = ()
    ends_in_product: ClassVar[bool] = True

    @property
    @abstractmethod
    def products(self) -> tuple[LinearGroup, ...]:
        """Its products, in the order of computation."""

    @property
    def vectors(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of its other tensors, by name in the layer."""
        return {}

    @property
    def state(self) -> KVState | None:
        """The state that it keeps from step to step, None if it keeps none."""
        return None

    @property
    def reads(self) -> int | None:
        """The layer whose state it reads in place of its own."""
        return None

    @property
    def recurrence(self) -> RecurrentState | None:
        """What it keeps of a request besides the state of single tokens, None if nothing."""
        return None

    @property
    @abstractmethod
    def workspace(self) -> int:
        """Values held while it computes."""

    def gathered_bytes(self, context: int) -> int:
        """Bytes in all, if state is gathered from its cache blocks before it is read."""
        return 0

    def work(self, context: int, row_bytes: RowBytes) -> Work:
        """The work for the newest of `context` tokens."""
        return Work()

    @abstractmethod
    def launches(self, *, is_fused: bool) -> int:
        """Kernels besides its products; `is_fused`: everything that can is fused into a product."""

    @abstractmethod
    def describe(self) -> str:
        """The sizes that determine its operators, in words."""

    @abstractmethod
    def build(self, parts: Parts) -> Block:
        """The block with its weights."""
