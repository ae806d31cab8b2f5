"""The ends of a decoder: from tokens to the residual stream, and from its last norm to logits."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm.model.linear import Projection
from localllm.model.packed.blocks import BlockWeight
from localllm.model.packed.weight import PackedWeight
from localllm_kernels.attention.capped import capped


@dataclass(frozen=True, slots=True)
class Embedding:
    """The embedding table.

    `scale`: a factor on its rows, rounded to the dtype of the table as the models were trained, not
    where it is in blocks of GGUF, whose values are floats; `row_dtype`: that of the residual
    stream; `dtype`: the model's.
    """

    table: Tensor | PackedWeight  # [vocab_size, hidden]
    scale: float
    row_dtype: torch.dtype
    dtype: torch.dtype

    @classmethod
    def of(
        cls,
        table: Tensor | PackedWeight,
        scale: float,
        row_dtype: torch.dtype,
        dtype: torch.dtype,
    ) -> "Embedding":
        """With the factor `scale` before it is rounded."""
        if not isinstance(table, BlockWeight):
            of_rows = table.dtype if isinstance(table, Tensor) else dtype
            scale = torch.tensor(scale, dtype=of_rows).item()
        return cls(table, scale, row_dtype, dtype)

    @property
    def device(self) -> torch.device:
        """Where the table lies."""
        return self.table.device if isinstance(self.table, Tensor) else self.table.codes.device

    def scaled(self, scale: float) -> "Embedding":
        """The same table with another factor before it is rounded."""
        return Embedding.of(self.table, scale, self.row_dtype, self.dtype)

    def __call__(self, input_ids: Tensor) -> Tensor:
        """`input_ids`: int64 [...] -> [..., hidden]."""
        if isinstance(self.table, Tensor):
            rows = F.embedding(input_ids, self.table)
        else:
            rows = self.table.rows(input_ids)
        return (rows if self.scale == 1 else rows * self.scale).to(self.row_dtype)


@dataclass(frozen=True, slots=True)
class Head:
    """The output head. Logits are multiplied by `scale` and then, with a `cap`, kept within it.

    `drafted`: int64 [rows of the projection], the ids of the only tokens that it has logits for;
    those of the other tokens of `vocab_size` are minus infinity.
    """

    projection: Projection
    scale: float = 1.0
    cap: float | None = None
    drafted: Tensor | None = None
    vocab_size: int = 0

    def __call__(self, hidden: Tensor) -> Tensor:
        """`hidden`: [rows, hidden], after the last norm -> float32 [rows, vocab_size]."""
        logits = self.projection(hidden).float()
        if self.scale != 1:
            logits = logits * self.scale
        if self.cap is not None:
            logits = capped(logits, self.cap)
        if self.drafted is None:
            return logits
        spread = logits.new_full((len(logits), self.vocab_size), float("-inf"))
        return spread.index_copy_(1, self.drafted, logits)


@dataclass(frozen=True, slots=True)
class ClusteredHead:
    """An output head whose tokens are in clusters of the same size, which `projection` scores. Only
    the tokens of the likeliest clusters have logits; those of the others are minus infinity (Gemma
    4's assistant).
    """

    projection: Projection
    tokens: Tensor  # int64 [clusters, tokens of each]
    table: Tensor  # [vocab_size, hidden]
    num_active: int

    def __call__(self, hidden: Tensor) -> Tensor:
        """As `Head.__call__`."""
        active = self.projection(hidden).topk(self.num_active, dim=-1).indices
        ids = self.tokens[active].flatten(1)
        logits = torch.einsum("rth,rh->rt", self.table[ids], hidden.to(self.table.dtype)).float()
        spread = logits.new_full((len(logits), len(self.table)), float("-inf"))
        return spread.scatter_(1, ids, logits)
