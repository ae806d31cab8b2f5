"""How far a product may be from the exact one, as follows from what is rounded on the way.

A rounding of unit u moves each term of a sum by up to u of it, evenly either way: a sum of terms t
is then off by u/√3 · √(Σ t²), as a standard deviation. DEVIATIONS of those never happen in
a test; an input that is left out, or a wrong scale, is far outside.
"""

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor

from localllm_kernels.products.fp8_matmul import fp8_matmul_reference

DEVIATIONS = 7.0
# Of float32 sums in any order, as a share of the sum of the magnitudes.
SUMMING = 1e-6


def unit(dtype: torch.dtype) -> float:
    """Half the distance between neighbours, as a share of the smaller one."""
    return torch.finfo(dtype).eps / 2


def scatter(x: Tensor, weight: Tensor, rounded: float) -> Tensor:
    """How far rounding each term of x · weightᵀ with this unit may move the sum."""
    return DEVIATIONS / sqrt(3) * rounded * F.linear(x.square(), weight.square()).sqrt()


def sum_bound(x: Tensor, weight: Tensor, rounded: float, least: Tensor | None = None) -> Tensor:
    """Of x [rows, in] · weightᵀ [in, out] (float64), where each x is rounded with this unit, and
    by `least` [rows, 1] at least: [rows, out].
    """
    bound = SUMMING * F.linear(x.abs(), weight.abs())
    bound += scatter(x, weight, rounded)
    if least is not None:
        bound += DEVIATIONS / sqrt(3) * least * weight.square().sum(-1).sqrt()
    return bound


def gated_bound(gate: Tensor, up: Tensor, bounds: Tensor) -> Tensor:
    """Of silu(gate) · up, whose own bounds stand beside each other: [rows, 2 · out]."""
    of_gate, of_up = bounds.chunk(2, dim=-1)
    steepest = 1.1  # of silu
    return steepest * of_gate * (up.abs() + of_up) + F.silu(gate).abs() * of_up


def assert_near(found: Tensor, exact: Tensor, bound: Tensor, roundings: float = 1.0) -> None:
    """Whether a result, rounded to its type in the end, is within its bound of the exact one.

    `roundings`: units that the result as a whole may be off by; Triton's interpreter cuts bfloat16
    off, inputs and results, where a GPU rounds.
    """
    allowed = bound + 1.01 * roundings * unit(found.dtype) * (exact.abs() + bound) + 1e-12
    away = (found.double() - exact).abs() / allowed
    assert found.shape == exact.shape
    assert not away.isnan().any()
    worst = away.max().item() if away.numel() else 0.0
    assert worst <= 1.0, f"{worst:.3g} times as far from the exact result as rounding explains"


def fp8_case(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], *, is_native: bool
) -> tuple[Tensor, Tensor]:
    """The exact product with a weight in e4m3, and its bound; `is_native`: x is rounded to e4m3,
    a row's largest value to 448.
    """
    exact = fp8_matmul_reference(x, codes, scales, block, None)
    weight = fp8_matmul_reference(
        torch.eye(x.shape[1], dtype=torch.float64, device=x.device), codes, scales, block, None
    ).T
    if not is_native:
        return exact, sum_bound(x.double(), weight, 0.0)
    subnormal = x.double().abs().amax(-1, keepdim=True) / 448 * 2.0**-10
    return exact, sum_bound(x.double(), weight, unit(torch.float8_e4m3fn), subnormal)
