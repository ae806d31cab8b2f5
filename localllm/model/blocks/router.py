"""The choice of a row's experts, and the factors on their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from localllm_kernels.experts.route import Routing


@dataclass(frozen=True, slots=True)
class Groups:
    """Experts in `count` groups, of which only the `chosen` ones with the highest sum of their
    `best` scores, one or two, may be taken.
    """

    count: int
    chosen: int
    best: int = 2


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """A router; sources: the families' modeling files in transformers.

    `top_k` of `num_experts` are chosen for a row, by the outputs of `linear`, which has a bias if
    `has_bias`. Scores are a softmax over all, or if `is_sigmoid` a sigmoid of each (DeepSeek V3,
    GLM-4); a softmax over the chosen ones alone (gpt-oss, Granite) is the one over all,
    renormalised. `renormalises`: the factors are divided by their
    sum; `factor`: they are multiplied by it. `correction`: the name of a vector that is added to
    the scores by which experts are chosen, not to the factors; `scales`: the name of a vector with
    which the experts' factors are multiplied in the end.
    """

    num_experts: int
    top_k: int
    linear: str = "mlp.gate"
    has_bias: bool = False
    is_sigmoid: bool = False
    renormalises: bool = False
    factor: float = 1.0
    groups: Groups | None = None
    correction: str | None = None
    scales: str | None = None

    def routing(self, correction: Tensor | None, scales: Tensor | None) -> Routing:
        """It with its vectors, float32 [num_experts]; see route.py."""
        from localllm_kernels.experts.route import Routing

        groups = self.groups or Groups(1, 1)
        return Routing(
            self.top_k,
            self.is_sigmoid,
            self.renormalises,
            self.factor,
            groups.count,
            groups.chosen,
            groups.best,
            correction,
            scales,
        )
