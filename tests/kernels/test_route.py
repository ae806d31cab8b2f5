"""The choice of experts: the reference by hand, and the C library against it."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import library_folder
from guards import needs_interpreter

from localllm_kernels import TORCH_OPS, Ops, cpu_ops
from localllm_kernels.experts.route import Routing, route_reference
from localllm_kernels.triton_ops import triton_ops

C_COMPILER = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")


@pytest.fixture(
    params=[
        "torch",
        pytest.param("c", marks=C_COMPILER),
        pytest.param("triton", marks=needs_interpreter),
    ]
)
def ops(request: pytest.FixtureRequest) -> Ops:
    if request.param == "triton":
        return triton_ops("cpu")
    return cpu_ops(library_folder()) if request.param == "c" else TORCH_OPS


@pytest.mark.parametrize("is_sigmoid", [False, True])
def test_of_equal_experts_the_first_is_chosen(ops: Ops, is_sigmoid: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0], [3.0] * 6])
    chosen, factors = ops.route(logits, Routing(3, is_sigmoid, renormalises=True))
    assert chosen.tolist() == [[1, 3, 2], [0, 1, 2]]
    assert chosen.dtype == torch.int32
    torch.testing.assert_close(factors.sum(-1), torch.ones(2))
    torch.testing.assert_close(factors[1], torch.full((3,), 1 / 3))


def test_logits_decide_where_scores_are_equal(ops: Ops) -> None:
    """Both sigmoids are 1 in float32."""
    assert ops.route(torch.tensor([[30.0, 31.0]]), Routing(1, True))[0].tolist() == [[1]]


def test_a_correction_chooses_and_does_not_weigh(ops: Ops) -> None:
    correction = torch.tensor([0.0, 0.1, 0.0, 0.3])
    how = Routing(2, True, factor=2.0, correction=correction)
    chosen, factors = ops.route(torch.zeros(1, 4), how)
    assert chosen.tolist() == [[3, 1]]
    assert factors.tolist() == [[1.0, 1.0]]


def test_experts_of_other_groups_are_not_chosen(ops: Ops) -> None:
    # The best expert is in the first group, the best two together are in the last.
    logits = torch.tensor([[3.0, -9.0, 0.0, 0.0, 2.0, 2.5]])
    assert ops.route(logits, Routing(2, True, groups=3))[0].tolist() == [[5, 4]]
    # Of equal groups the first is taken.
    assert ops.route(torch.ones(1, 6), Routing(2, True, groups=3))[0].tolist() == [[0, 1]]
    # Rated by their best one alone, the first group is better than the last.
    alone = Routing(2, groups=3, group_best=1)
    assert ops.route(logits, alone)[0].tolist() == [[0, 1]]
    two = Routing(3, groups=3, chosen_groups=2, group_best=1)
    assert ops.route(logits, two)[0].tolist() == [[0, 5, 4]]


def test_scales_are_those_of_the_chosen(ops: Ops) -> None:
    how = Routing(2, renormalises=True, scales=torch.tensor([1.0, 2.0, 4.0]))
    _, factors = ops.route(torch.tensor([[0.0, 0.0, -99.0]]), how)
    torch.testing.assert_close(factors, torch.tensor([[0.5, 1.0]]))


def test_a_row_that_is_not_finite_leaves_others_alone(ops: Ops) -> None:
    logits = torch.randn(3, 20)
    expected = ops.route(logits, Routing(4, renormalises=True))
    broken = logits.clone()
    broken[1] = torch.nan
    chosen, factors = ops.route(broken, Routing(4, renormalises=True))
    assert factors[1].isnan().all()
    assert ((chosen >= 0) & (chosen < 20)).all()
    for row in (0, 2):
        assert torch.equal(chosen[row], expected[0][row])
        assert torch.equal(factors[row], expected[1][row])


WAYS: dict[str, Callable[[int], Routing]] = {
    "softmax": lambda count: Routing(2),
    "renormalised": lambda count: Routing(4, renormalises=True, factor=1.7),
    "sigmoid": lambda count: Routing(3, True, True, correction=torch.randn(count) / 9),
    "groups": lambda count: Routing(4, True, groups=4, chosen_groups=2),
    "groups, corrected": lambda count: Routing(
        4, True, True, groups=4, chosen_groups=2, correction=torch.randn(count) / 9
    ),
    "groups by their best": lambda count: Routing(4, groups=4, chosen_groups=2, group_best=1),
    "scales": lambda count: Routing(4, scales=torch.rand(count)),
}


@pytest.mark.parametrize("count", [8, 60, 128])
@pytest.mark.parametrize("way", WAYS)
def test_libraries_choose_as_the_reference(ops: Ops, way: str, count: int) -> None:
    how = WAYS[way](count)
    logits = 3 * torch.randn(33, count)
    found: Any = ops.route(logits, how)
    expected = route_reference(logits, how)
    assert torch.equal(found[0], expected[0])
    # Exponentials are within two units in the last place of torch's.
    torch.testing.assert_close(found[1], expected[1], atol=0, rtol=2e-6)
    for rows in (slice(0, 1), slice(5, 9), slice(32, 33)):
        alone = ops.route(logits[rows], how)
        assert all(torch.equal(a, b[rows]) for a, b in zip(alone, found, strict=True))
