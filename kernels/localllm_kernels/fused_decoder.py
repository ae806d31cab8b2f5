"""All layers of a decoder as one operator, where a library has it: what it is made of.

It computes what the other operators compute one by one, in the same order, to the same bits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from localllm_kernels.kv_cache import KVCache

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class LayerParts:
    """Norm weights, the four products of a layer, and its window."""

    input_norm: Tensor
    post_attention_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: Product
    output: Product
    gate_up: Product
    down: Product
    window: int | None

    @property
    def products(self) -> tuple[Product, Product, Product, Product]:
        """In the order in which they compute."""
        return self.qkv, self.output, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class DecoderParts:
    """Every layer, the last norm, and the sizes that no tensor tells."""

    layers: Sequence[LayerParts]
    last_norm: Tensor
    eps: float
    num_heads: int
    num_kv_heads: int
    head_dim: int


class FusedDecoder(Protocol):
    """The layers with the last norm."""

    def takes(self, num_rows: int, max_query_len: int) -> bool:
        """Whether it is the better way for so many rows, of a request at most `max_query_len`."""

    def __call__(
        self,
        hidden: Tensor,
        cos: Tensor,
        sin: Tensor,
        caches: KVCache,
        *,
        slot_mapping: Tensor,
        block_tables: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        max_query_len: int,
    ) -> Tensor:
        """Hidden states [num_rows, hidden] after the last norm; the caches are written.

        `hidden`: the embedded tokens; `cos`, `sin`: [num_rows, head_dim / 2]; `caches`: those of
        all layers, each tensor with a first dimension of layers; the rest as in `paged_attention`.
        """
