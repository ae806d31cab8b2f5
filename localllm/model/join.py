"""How a head begins: each token's embedding is joined with the hidden state before it.

    x_i = join · [norm(embedding of token i + 1), norm(hidden state i)]

Sources: Li et al. 2024 (EAGLE, section 4.1), without norms; the report on DeepSeek V3, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.model.norm import Norm, NormSpec

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection
    from localllm_kernels import Ops

# The linear, and the tensor with the ids of the tokens that the head has logits for.
JOIN, DRAFTED = "model.join", "model.drafted"


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """The norms of embeddings and of hidden states. `num_drafted`: the tokens that the head's own
    output head has logits for; None where it shares the target's.
    """

    embedding: NormSpec
    hidden: NormSpec
    num_drafted: int | None = None

    def vectors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the norms' weights, by full name."""
        return {f"{norm.name}.weight": (hidden_size,) for norm in (self.embedding, self.hidden)}


@dataclass(frozen=True, slots=True)
class Join:
    """A join with its weights."""

    linear: Projection
    embedding: Norm
    hidden: Norm

    def __call__(self, embedded: Tensor, hidden: Tensor, ops: Ops) -> Tensor:
        """Both [num_tokens, hidden]; returns the same shape."""
        import torch

        parts = self.embedding(embedded, ops), self.hidden(hidden, ops)
        return self.linear(torch.cat(parts, dim=-1))
