"""The choice of a row's experts from its router's logits, and the factors on their outputs.

Scores are a softmax over all experts, or a sigmoid of each; a softmax over the chosen ones alone is
the one over all, renormalised. With `correction` experts are chosen by score + correction; with
`groups` only from the `chosen_groups` of them whose best `group_best` sum up highest: one in
DeepSeek V2, two in V3 (DeepSeek-AI 2024, "DeepSeek-V2", section 2.2.2, and "DeepSeek-V3", section
2.1.2). Of equal experts the one with the lower number is chosen.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routing:
    """How to choose; see the top of the file.

    `top_k`: experts of a row; `renormalises`: the factors are divided by their sum; `factor`: on
    all of them; `correction`, `scales`: float32 [num_experts], the latter on the factor of each.
    """

    top_k: int
    is_sigmoid: bool = False
    renormalises: bool = False
    factor: float = 1.0
    groups: int = 1
    chosen_groups: int = 1
    group_best: int = 2
    correction: Tensor | None = None
    scales: Tensor | None = None


def route_reference(logits: Tensor, how: Routing) -> tuple[Tensor, Tensor]:
    """`logits`: [rows, num_experts] -> the experts, int32 [rows, top_k], and float32 factors."""
    logits = logits.float()
    # Not torch's sigmoid, whose vector loop and scalar tail may differ in the last bit.
    scores = 1 / (1 + (-logits).exp()) if how.is_sigmoid else logits.softmax(-1)
    # Logits that differ may have scores that do not.
    ranked = logits
    if how.correction is not None or how.groups > 1:
        ranked = scores if how.correction is None else scores + how.correction
    if how.groups > 1:
        ranked = _within_groups(ranked, how)
    chosen = ranked.sort(dim=-1, descending=True, stable=True).indices[:, : how.top_k]
    factors = scores.gather(1, chosen)
    if how.renormalises:
        factors = factors / (factors.sum(-1, keepdim=True) + 1e-20)
    if how.scales is not None:
        factors = factors * how.scales[chosen]
    return chosen.int(), factors * how.factor


def _within_groups(ranked: Tensor, how: Routing) -> Tensor:
    """`ranked` with the experts of other groups below all others."""
    by_group = ranked.view(len(ranked), how.groups, -1)
    best = by_group.topk(how.group_best, dim=-1).values.sum(-1)
    order = best.sort(dim=-1, descending=True, stable=True).indices
    is_out = torch.ones_like(best).scatter(1, order[:, : how.chosen_groups], 0).bool()
    return by_group.masked_fill(is_out[:, :, None], float("-inf")).flatten(1)
