"""The bounds of the kernels' tests: a kernel that only rounds is inside, one that errs is not."""

import pytest
import torch
from in_turns import in_turns
from int4_case import Case
from rounding import assert_near, fp8_case, sum_bound, unit

from localllm_kernels.products.int4_matmul import int4_matmul_reference
from localllm_kernels.products.int4_weight import NOTHING, Around

NORM = (torch.rand(2048, generator=torch.Generator().manual_seed(0)) + 0.5).bfloat16()
AROUND = {
    "nothing": NOTHING,
    "norm": Around(norm=NORM, eps=1e-5),
    "gate": Around(norm=NORM, eps=1e-5, is_gated=True),
}


def rounded_product(case: Case, x: torch.Tensor, around: Around) -> torch.Tensor:
    """What a kernel without a fault gives for several rows: x · norm and the result are rounded."""
    factor = 1.0
    if around.norm is not None:
        factor = torch.rsqrt(x.double().square().mean(-1, keepdim=True) + around.eps)
        x = (x.float() * around.norm.float()).to(case.dtype)
    sums = x.double() @ case.dense().T * factor
    if around.is_gated:
        gate, up = sums.chunk(2, dim=-1)
        sums = torch.nn.functional.silu(gate) * up
    return sums.to(case.dtype)


@pytest.mark.parametrize(
    ("num_rows", "around", "is_permuted"), in_turns([2, 16, 64], list(AROUND), [True, False])
)
def test_int4(num_rows: int, is_permuted: bool, around: str) -> None:
    given = AROUND[around]
    case = Case(2048, 1536, 128, is_symmetric=False, is_permuted=is_permuted, dtype=torch.bfloat16)
    x = case.rows(num_rows)
    parts = (case.codes, case.scales, case.zeros, case.permutation, case.bias)
    exact = int4_matmul_reference(x, *parts, given)
    bound = case.bound(x, given)
    assert_near(rounded_product(case, x, given), exact, bound)
    case.scales[:, 2] *= 1.5  # of one group of inputs
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_near(rounded_product(case, x, given), exact, bound)


@pytest.mark.parametrize("num_rows", [33, 700])
def test_fp8(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_rows, 1024, generator=generator).bfloat16()
    codes = torch.randn(512, 1024, generator=generator).to(torch.float8_e4m3fn)
    scales = torch.rand(512, 1, generator=generator) / 32
    exact, bound = fp8_case(x, codes, scales, (1, 1024), is_native=True)
    largest = x.double().abs().amax(-1, keepdim=True) / 448
    as_it_is = (x.double() / largest).float().to(torch.float8_e4m3fn).double() * largest
    weight = codes.double() * scales.double()
    assert_near((as_it_is @ weight.T).bfloat16(), exact, bound)
    as_it_is[:, :32] = 0  # a block of inputs left out
    with pytest.raises(AssertionError, match="rounding explains"):
        assert_near((as_it_is @ weight.T).bfloat16(), exact, bound)


def test_what_is_exact_but_for_the_result_has_a_narrow_bound() -> None:
    x = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).double()
    weight = torch.randn(8, 512, generator=torch.Generator().manual_seed(1)).double()
    exact, bound = x @ weight.T, sum_bound(x, weight, 0.0)
    assert_near(exact.half(), exact, bound)
    with pytest.raises(AssertionError):
        assert_near((exact * (1 + 3 * unit(torch.float16))).half(), exact, bound)
