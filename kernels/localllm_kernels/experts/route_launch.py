"""The choice of experts on a GPU, see `route.py`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.compiling.aot import AotSpec
from localllm_kernels.compiling.launch import present
from localllm_kernels.experts.route import Routing, route_reference


@triton.jit
def _route_kernel(
    logits_ptr,
    correction_ptr,
    scales_ptr,
    chosen_ptr,
    factors_ptr,
    num_experts,
    factor,
    TOP_K: tl.constexpr,
    IS_SIGMOID: tl.constexpr,
    RENORMALISES: tl.constexpr,
    HAS_CORRECTION: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    EXPERTS: tl.constexpr,
    PLACES: tl.constexpr,
):
    """One row per program; EXPERTS and PLACES: experts and TOP_K, rounded up to powers of two."""
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, EXPERTS)
    inside = experts < num_experts
    at = logits_ptr + row * num_experts + experts
    logits = tl.load(at, mask=inside, other=float("-inf")).to(tl.float32)
    if IS_SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-logits))
    else:
        powers = tl.exp(logits - tl.max(logits, axis=0))
        scores = powers / tl.sum(powers, axis=0)
    ranked = logits
    if HAS_CORRECTION:
        ranked = scores + tl.load(correction_ptr + experts, mask=inside, other=0.0)
        ranked = tl.where(inside, ranked, float("-inf"))
    places = tl.arange(0, PLACES)
    chosen = tl.zeros([PLACES], tl.int32)
    factors = tl.zeros([PLACES], tl.float32)
    # An expert that was taken stays out even if the others are at minus infinity.
    is_left = inside
    for place in tl.static_range(TOP_K):
        best = tl.max(tl.where(is_left, ranked, float("-inf")), axis=0)
        is_best = is_left & ((ranked == best) | (ranked != ranked))
        expert = tl.min(tl.where(is_best, experts, EXPERTS), axis=0)
        is_it = experts == expert
        is_left = is_left & (experts != expert)
        chosen = tl.where(places == place, expert, chosen)
        factors = tl.where(places == place, tl.sum(tl.where(is_it, scores, 0.0), axis=0), factors)
    if RENORMALISES:
        factors = factors / (tl.sum(factors, axis=0) + 1e-20)
    if HAS_SCALES:
        factors *= tl.load(scales_ptr + chosen, mask=places < TOP_K, other=0.0)
    out = row * TOP_K + places
    tl.store(chosen_ptr + out, chosen, mask=places < TOP_K)
    tl.store(factors_ptr + out, factors * factor, mask=places < TOP_K)


def route(logits: Tensor, how: Routing) -> tuple[Tensor, Tensor]:
    """See route_reference, which chooses where there are groups."""
    if how.groups > 1:
        return route_reference(logits, how)
    num_rows, num_experts = logits.shape
    chosen = torch.empty(num_rows, how.top_k, dtype=torch.int32, device=logits.device)
    factors = torch.empty(num_rows, how.top_k, dtype=torch.float32, device=logits.device)
    if num_rows:
        _route_kernel[(num_rows,)](
            logits.contiguous(),
            present(how.correction, factors),
            present(how.scales, factors),
            chosen,
            factors,
            num_experts,
            how.factor,
            TOP_K=how.top_k,
            IS_SIGMOID=how.is_sigmoid,
            RENORMALISES=how.renormalises,
            HAS_CORRECTION=how.correction is not None,
            HAS_SCALES=how.scales is not None,
            EXPERTS=triton.next_power_of_2(num_experts),
            PLACES=triton.next_power_of_2(how.top_k),
            num_warps=1,
        )
    return chosen, factors


def _example() -> None:
    how = Routing(8, is_sigmoid=True, renormalises=True, correction=torch.empty(128))
    route(torch.empty(1, 128, dtype=torch.bfloat16), how)


AOT_SPECS = [AotSpec(_route_kernel, "8 of 128 experts", lambda _: _example())]
