"""Per-layer inputs (Gemma 3n and 4): for each token and layer a short row, of which one part is
looked up by the token, and one projected from the token's embedding.

    input = (norm(projection · embedding / √hidden) + √width · table[token]) / √2

Only the rows of the tokens at hand are read from the table, however large it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from localllm.model.norm import Norm, NormSpec

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.ends import Embedding
    from localllm.model.linear import Projection
    from localllm_kernels import Ops

TABLE, PROJECTION = "model.embed_tokens_per_layer.weight", "model.per_layer_model_projection"
_NORM = "model.per_layer_projection_norm"


@dataclass(frozen=True, slots=True)
class PerLayerSpec:
    """The table's tokens, the values for each layer, and the norm's epsilon."""

    vocab_size: int
    width: int
    eps: float

    @property
    def norm(self) -> NormSpec:
        """The norm of the projected part."""
        return NormSpec(_NORM, self.eps, rounds_last=True)

    def tensors(self, hidden_size: int, num_layers: int) -> dict[str, tuple[int, ...]]:
        """Shapes of its tensors in an unquantized checkpoint, by full name."""
        width = num_layers * self.width
        return {
            TABLE: (self.vocab_size, width),
            f"{PROJECTION}.weight": (width, hidden_size),
            f"{_NORM}.weight": (self.width,),
        }


@dataclass(frozen=True, slots=True)
class PerLayerInputs:
    """The per-layer inputs with their weights."""

    spec: PerLayerSpec
    table: Embedding  # [vocab_size, num_layers · width]
    projection: Projection
    norm: Norm
    ops: Ops

    def __call__(self, input_ids: Tensor, embedded: Tensor) -> Tensor:
        """[num_layers, num_tokens, width]; `input_ids`: int64 [num_tokens]; `embedded`: their
        scaled embeddings, [num_tokens, hidden].
        """
        width = self.spec.width
        looked_up = self.table(input_ids) * width**0.5
        projected = self.projection(embedded) * embedded.shape[1] ** -0.5
        normed = self.norm(projected.view(-1, width), self.ops).view_as(projected)
        both: Tensor = (normed + looked_up.to(normed.dtype)) * 2**-0.5
        return both.view(len(both), -1, width).transpose(0, 1).contiguous()
