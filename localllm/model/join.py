"""How a head begins: each token's embedding is joined with the hidden state before it.

    x_i = join · [norm(embedding of token i + 1), norm(hidden state i)]

In EAGLE-3 there is no such linear: its first layer reads both side by side, and the hidden state
goes on as the residual stream. That state comes from several of the target's layers:

    hidden state i = fusion · [state of layer a, state of layer b, …]

while the head's own states are taken as they are.

Gemma 4's assistant is narrower than its target: the join leads from the target's width to its own,
and another linear back from its last state to what stands for a hidden state of the target.

Sources: Li et al. 2024 (EAGLE, section 4.1), without norms; Li et al. 2025 (EAGLE-3, section 3.1);
the report on DeepSeek V3, section 2.2.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from localllm.model.norm import Norm, NormSpec

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.linear import Projection
    from localllm_kernels import Ops

# The linears, and the tensor that says which tokens the head has logits for.
JOIN, FUSION, BACK, DRAFTED = "model.join", "model.fusion", "model.back", "model.drafted"
# The linear that scores clusters of tokens, and the tensor with the tokens of each cluster.
CLUSTERS, CLUSTER_TOKENS = "model.clusters", "model.cluster_tokens"


class DraftedAs(Enum):
    """What the tensor of drafted tokens holds for each row of a head's output head."""

    IDS = auto()
    # The token's id less the row's number.
    OFFSETS = auto()
    # There is no such tensor: the rows are those of all tokens.
    ALL = auto()


@dataclass(frozen=True, slots=True)
class FusionSpec:
    """The fusion of `num_states` hidden states of `width` values.

    `norms`: one of all of them as one row, or one of each, or none.
    """

    num_states: int
    width: int
    norms: tuple[NormSpec, ...] = ()

    @property
    def width_in(self) -> int:
        """Width of its inputs."""
        return self.num_states * self.width

    def vectors(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the norms' weights, by full name."""
        width = self.width_in // max(1, len(self.norms))
        return {f"{norm.name}.weight": (width,) for norm in self.norms}


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Tokens in `number` clusters of one size; those of the `num_active` likeliest have logits."""

    number: int
    num_active: int


@dataclass(frozen=True, slots=True)
class JoinSpec:
    """The beginning of a head, and what else it has in place of its target's.

    `embedding`, `hidden`: the norms of both, None for none; `is_wide`: both stand side by side as
    the first layer's inputs, and the residual stream is the hidden state, with `adds_normed` behind
    its norm; `has_bias`: of the linear; `fusion`: None where one hidden state is taken as it is.

    `num_drafted`: the tokens that its own output head has logits for, None where it shares the
    target's; `drafted_as`: how they are given; `has_embedding`: it has a table of its own;
    `has_last_norm`: there is a norm before the output head; `clusters`: None where all of its
    tokens have logits. `width`: of embeddings and hidden states, and of a linear back to them; None
    where it is that of the head's layers, and there is no such linear.
    """

    embedding: NormSpec | None
    hidden: NormSpec | None
    num_drafted: int | None = None
    drafted_as: DraftedAs = DraftedAs.IDS
    is_wide: bool = False
    adds_normed: bool = False
    has_bias: bool = False
    fusion: FusionSpec | None = None
    has_embedding: bool = False
    has_last_norm: bool = True
    clusters: ClusterSpec | None = None
    width: int | None = None

    def state_width(self, hidden_size: int) -> int:
        """Width of the embeddings and hidden states that it joins."""
        return hidden_size if self.width is None else self.width

    def linears(self, hidden_size: int) -> dict[str, tuple[int, int]]:
        """(out, in) of its linears, by full name, without the output head's."""
        shapes = {} if self.is_wide else {JOIN: (hidden_size, 2 * self.state_width(hidden_size))}
        if self.width is not None:
            shapes[BACK] = (self.width, hidden_size)
        if self.clusters is not None:
            shapes[CLUSTERS] = (self.clusters.number, hidden_size)
        if self.fusion is not None:
            shapes[FUSION] = (hidden_size, self.fusion.width_in)
        return shapes

    def vectors(self, hidden_size: int) -> dict[str, tuple[int, ...]]:
        """Shapes of its other tensors, by full name."""
        shapes: dict[str, tuple[int, ...]] = {
            f"{norm.name}.weight": (hidden_size,)
            for norm in (self.embedding, self.hidden)
            if norm is not None
        }
        if self.has_bias:
            shapes[f"{JOIN}.bias"] = (hidden_size,)
        if self.num_drafted is not None and self.drafted_as is not DraftedAs.ALL:
            shapes[DRAFTED] = (self.num_drafted,)
        if self.num_drafted is not None and self.clusters is not None:
            shapes[CLUSTER_TOKENS] = (self.num_drafted,)
        return shapes if self.fusion is None else {**shapes, **self.fusion.vectors()}


@dataclass(frozen=True, slots=True)
class Fusion:
    """A fusion with its weights."""

    linear: Projection
    norms: tuple[Norm, ...]

    def __call__(self, states: Tensor, ops: Ops) -> Tensor:
        """`states`: [rows, num_states · width], side by side -> [rows, hidden]."""
        import torch

        if len(self.norms) == 1:
            states = self.norms[0](states, ops)
        elif self.norms:
            parts = states.chunk(len(self.norms), dim=-1)
            normed = (
                norm(part.contiguous(), ops) for norm, part in zip(self.norms, parts, strict=True)
            )
            states = torch.cat(tuple(normed), dim=-1)
        return self.linear(states)


@dataclass(frozen=True, slots=True)
class Join:
    """A join with its weights; `linear`: None where it is wide."""

    linear: Projection | None
    embedding: Norm | None
    hidden: Norm | None
    adds_normed: bool = False
    fusion: Fusion | None = None
    back: Projection | None = None

    def __call__(self, embedded: Tensor, hidden: Tensor, ops: Ops) -> tuple[Tensor, Tensor | None]:
        """The residual stream, [num_tokens, hidden], and what the first layer reads, [num_tokens,
        2 · hidden]; None where that is the residual stream. `embedded`, `hidden`: [num_tokens,
        width], see JoinSpec.
        """
        import torch

        first = embedded if self.embedding is None else self.embedding(embedded, ops)
        second = hidden if self.hidden is None else self.hidden(hidden, ops)
        both = torch.cat((first, second), dim=-1)
        if self.linear is not None:
            return self.linear(both), None
        return second if self.adds_normed else hidden, both
