"""The choice of a row's experts, and the factors on their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


class Scoring(Enum):
    """How factors come from the router's logits: by a softmax over all experts, or by a sigmoid of
    each (DeepSeek V3, GLM-4). A softmax over the chosen ones alone (gpt-oss, Granite) is the one
    over all, renormalised.
    """

    SOFTMAX = "a softmax over all"
    SIGMOID = "a sigmoid of each"


@dataclass(frozen=True, slots=True)
class Groups:
    """Experts in `count` groups, of which only the `chosen` ones with the highest sum of their best
    two may be taken.
    """

    count: int
    chosen: int


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """A router; sources: the families' modeling files in transformers.

    `top_k` of `num_experts` are chosen for a row. `renormalises`: the factors are divided by their
    sum; `factor`: they are multiplied by it. `correction`: the name of a vector that is added to
    the scores by which experts are chosen, not to the factors; `scales`: the name of a vector with
    which the experts' factors are multiplied in the end.
    """

    num_experts: int
    top_k: int
    scoring: Scoring
    renormalises: bool = False
    factor: float = 1.0
    groups: Groups | None = None
    correction: str | None = None
    scales: str | None = None

    def choose(
        self, logits: Tensor, correction: Tensor | None = None, scales: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The experts of each row, int32 [rows, top_k], best first, and the factors on them,
        float32. Of equal experts the one with the lower number is chosen.

        `logits`: [rows, num_experts]; `correction`, `scales`: float32 [num_experts].
        """
        logits = logits.float()
        if self.scoring is Scoring.SOFTMAX:
            scores = logits.softmax(-1)
        else:
            # Not torch's sigmoid, whose vector loop and scalar tail may differ in the last bit.
            scores = 1 / (1 + (-logits).exp())
        # Logits that differ may have scores that do not.
        ranked = logits
        if correction is not None or self.groups is not None:
            ranked = scores if correction is None else scores + correction
        if self.groups is not None:
            ranked = _within(self.groups, ranked)
        chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : self.top_k]
        factors = scores.gather(1, chosen)
        if self.renormalises:
            factors = factors / (factors.sum(-1, keepdim=True) + 1e-20)
        if scales is not None:
            factors = factors * scales[chosen]
        return chosen.int(), factors * self.factor


def _within(groups: Groups, ranked: Tensor) -> Tensor:
    """`ranked` with the experts of other groups below all others."""
    by_group = ranked.view(len(ranked), groups.count, -1)
    best = by_group.topk(2, dim=-1).values.sum(-1)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    is_out = best.new_ones(best.shape).scatter(1, order[:, : groups.chosen], 0).bool()
    return by_group.masked_fill(is_out[:, :, None], float("-inf")).flatten(1)
