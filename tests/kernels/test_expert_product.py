"""Experts' products, tasks and sums under Triton's interpreter, against float64."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from blocks import random_blocks
from guards import GuardedMemory, needs_interpreter
from interpreter import product_of_rows_alike
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from localllm.model.packed.blocks import BlockWeight
from localllm.model.packed.gguf_blocks import BLOCKS, dequantize_blocks
from localllm_kernels.experts.gpu_experts import MAX_ROWS_BY_PAIR, ExpertLinears
from localllm_kernels.experts.product import (
    FEW,
    MANY,
    Pairs,
    expert_product,
    expert_product_reference,
)
from localllm_kernels.experts.stacked_weight import (
    StackedKind,
    StackedWeight,
    pack_halves,
    unpack_halves,
)
from localllm_kernels.experts.sum import expert_sum, expert_sum_reference
from localllm_kernels.experts.tasks import expert_tasks, expert_tasks_reference
from localllm_kernels.pointwise.gate import GateKind, gate_reference, parts_of
from localllm_kernels.trellis import BYTES, IN_BYTES, Mixing

pytestmark = needs_interpreter

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
# Kind, inputs, inputs that share a scale; blocks are of Q4_K, or of Q5_0 where these do not fit.
FORMS: list[tuple[StackedKind, int, int]] = [
    ("plain", 200, 200),
    ("int8", 256, 256),
    ("fp8", 256, 128),
    ("fp8", 72, 72),
    ("int4", 256, 128),
    ("int4", 192, 64),
    ("int4", 96, 32),
    ("mxfp4", 160, 32),
    ("nvfp4", 160, 16),
    ("trellis3", 160, 160),
    ("trellis3", 1040, 1040),
    ("blocks", 512, 512),
    ("blocks", 160, 160),
]
NUM_EXPERTS, TOP_K = 5, 2


@pytest.fixture(autouse=True)
def rows_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", product_of_rows_alike)


def chosen_experts(rows: int, num_experts: int = NUM_EXPERTS, top_k: int = TOP_K) -> Tensor:
    drawn = [torch.randperm(num_experts)[:top_k] for _ in range(rows)]
    return torch.stack(drawn).int() if drawn else torch.empty(0, top_k, dtype=torch.int32)


def drawn_weight(
    kind: StackedKind, width_in: int, group: int, width_out: int, dtype: torch.dtype
) -> StackedWeight:
    torch.manual_seed(width_in)
    shape, num_groups = (NUM_EXPERTS, width_out, width_in), width_in // group
    bias = torch.randn(shape[:2]).to(dtype) if kind in ("plain", "int4") else None
    if kind == "plain":
        return StackedWeight(kind, torch.randn(shape).to(dtype), None, None, bias, width_in)
    if kind == "blocks":
        name = "Q5_0" if width_in % 256 else "Q4_K"
        blocks = random_blocks(name, NUM_EXPERTS * width_out, width_in).codes
        return StackedWeight(
            *(kind, blocks.view(*shape[:2], -1), None, None, bias, width_in), block_type=name
        )
    if kind == "trellis3":
        rows = torch.randint(256, (*shape[:2], width_in // IN_BYTES * BYTES), dtype=torch.uint8)
        return StackedWeight(
            *(kind, F.pad(rows, (1, 0)), None, None, bias, width_in),
            factors=torch.rand(shape[:2]) / 16,
            mixing=Mixing.of(width_in, dtype, torch.device("cpu")),
        )
    scales = torch.rand(*shape[:2], num_groups) / 8
    if kind == "int8":
        codes = torch.randint(-127, 128, shape, dtype=torch.int8)
        return StackedWeight(kind, codes, (scales / 16).to(dtype), None, bias, width_in)
    if kind == "fp8":
        codes = torch.randn(shape).to(torch.float8_e4m3fn)
        return StackedWeight(kind, codes, scales, None, bias, width_in)
    codes = torch.randint(0, 16, shape, dtype=torch.uint8)
    packed = pack_halves(codes.flatten(0, 1)).view(*shape[:2], -1)
    assert torch.equal(unpack_halves(packed), codes)
    if kind == "mxfp4":
        exponents = torch.randint(120, 128, scales.shape, dtype=torch.uint8)
        return StackedWeight(kind, packed, exponents, None, bias, width_in)
    if kind == "nvfp4":
        stored = (8 * scales).to(torch.float8_e4m3fn).view(torch.uint8)
        factors = torch.rand(shape[:2])
        return StackedWeight(kind, packed, stored, None, bias, width_in, factors=factors)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if group == 64 else None
    return StackedWeight(kind, packed, scales.to(dtype), zeros, bias, width_in)


def exact_products(
    x: Tensor, weight: StackedWeight, chosen: Tensor, gate: GateKind | None
) -> Tensor:
    """The reference, which has blocks as plain values, rounded as in the product."""
    if weight.block_type is not None:
        blocks = dequantize_blocks(BLOCKS[weight.block_type], weight.codes.flatten(0, 1))
        values = blocks.to(x.dtype).view(*weight.codes.shape[:2], -1)
        weight = StackedWeight("plain", values, None, None, weight.bias, weight.width_in)
    return expert_product_reference(x, weight, chosen, gate)


# Every form, and every precision with every gate; each with each only in a slow run.
PAIRED = [
    pytest.param(*form, *how, marks=[] if place == i % 4 else [pytest.mark.slow])
    for i, form in enumerate(FORMS)
    for place, how in enumerate(product(TOLERANCE, (None, "clamped")))
]


@pytest.mark.parametrize(("kind", "width_in", "group", "dtype", "gate"), PAIRED)
def test_pairs_have_equal_bits_alone_and_in_any_task(
    kind: StackedKind, width_in: int, group: int, dtype: torch.dtype, gate: GateKind | None
) -> None:
    weight, rows = drawn_weight(kind, width_in, group, 72, dtype), 40
    chosen = chosen_experts(rows)
    x = (torch.randn(rows, width_in) / width_in**0.5).to(dtype)
    few, many = (
        expert_product(x, weight, Pairs(chosen, expert_tasks(chosen, 5, most)), gate)
        for most in (FEW, MANY)
    )
    expected = exact_products(x, weight, chosen, gate)
    off = (few.double() - expected).abs().max() / expected.abs().max()
    assert off <= TOLERANCE[dtype]
    assert torch.equal(many, few)
    for alone in (slice(0, 6), slice(7, 9)):
        by_pair = expert_product(x[alone], weight, Pairs(chosen[alone]), gate)
        assert torch.equal(by_pair, few[alone.start * TOP_K : alone.stop * TOP_K])


@pytest.mark.parametrize(("kind", "width_in", "group"), FORMS)
def test_nothing_outside_is_read(kind: StackedKind, width_in: int, group: int) -> None:
    weight = drawn_weight(kind, width_in, group, 72, torch.float32)
    chosen, x = chosen_experts(5), torch.randn(5, width_in)
    expected = expert_product(x, weight, Pairs(chosen, expert_tasks(chosen, 5, FEW)))
    with GuardedMemory() as memory:
        codes, scales = (
            None if each is None else memory.guarded(each) for each in (weight.codes, weight.scales)
        )
        assert codes is not None
        guarded = replace(weight, codes=codes, scales=scales)
        pairs = Pairs(memory.guarded(chosen), expert_tasks(chosen, 5, FEW))
        found = expert_product(memory.guarded(x), guarded, pairs)
    memory.check()
    assert torch.equal(found, expected)


def test_experts_without_a_slot_are_left_out() -> None:
    weight = drawn_weight("plain", 200, 200, 72, torch.float32)
    chosen, x = chosen_experts(20), torch.randn(20, 200)
    whole = expert_product(x, weight, Pairs(chosen))
    # The experts 3 and 1 alone are there, in this order.
    held = replace(weight, codes=weight.codes[[3, 1]], bias=weight.bias[[3, 1]])  # type: ignore[index]
    slots = torch.tensor([-1, 1, -1, 0, -1], dtype=torch.int32)
    for tasks in (None, expert_tasks(chosen, NUM_EXPERTS, FEW)):
        out = torch.full_like(whole, 7.0)
        expert_product(x, held, Pairs(chosen, tasks, slots), out=out)
        is_held = slots[chosen.flatten().long()] >= 0
        assert torch.equal(out[is_held], whole[is_held])
        assert (out[~is_held] == 7.0).all()


@pytest.mark.parametrize("most", [FEW, MANY])
@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k"), [(1, 8, 2), (5, 7, 3), (300, 12, 8), (40, 4, 4), (600, 3, 2)]
)
def test_tasks_are_those_of_sorting(rows: int, num_experts: int, top_k: int, most: int) -> None:
    torch.manual_seed(rows)
    chosen = chosen_experts(rows, num_experts, top_k)
    found = expert_tasks(chosen, num_experts, most)
    expected = expert_tasks_reference(chosen, num_experts, most)
    assert torch.equal(found.order, expected.order)
    assert torch.equal(found.table, expected.table)
    assert found.table[:, 2].sum() == chosen.numel()


def test_tasks_where_one_expert_has_all_pairs() -> None:
    chosen = torch.full((50, 1), 2, dtype=torch.int32)
    found = expert_tasks(chosen, 4, FEW)
    assert torch.equal(found.table, expert_tasks_reference(chosen, 4, FEW).table)


@pytest.mark.parametrize(("rows", "width"), [(0, 8), (1, 8), (9, 1500)])
def test_sums_are_in_the_order_of_the_choice(rows: int, width: int) -> None:
    y, factors = torch.randn(rows * 4, width), torch.rand(rows, 4)
    torch.testing.assert_close(expert_sum(y, factors), expert_sum_reference(y, factors))


@pytest.mark.parametrize("rows", [1, MAX_ROWS_BY_PAIR, MAX_ROWS_BY_PAIR + 1, 90])
@pytest.mark.parametrize("kind", ["silu", "relu2"])
def test_rows_of_a_mixture_do_not_depend_on_others(kind: GateKind, rows: int) -> None:
    linears, hidden, inner = ExpertLinears(), 64, 96
    torch.manual_seed(1)
    first = torch.randn(NUM_EXPERTS, parts_of(kind) * inner, hidden) / hidden**0.5
    last = torch.randn(NUM_EXPERTS, hidden, inner) / inner**0.5
    experts = linears.experts(
        [linears.plain(each, None) for each in first],
        [linears.plain(each, None) for each in last],
        kind,
    )
    assert experts is not None
    gate = partial(gate_reference, kind=kind)
    x, chosen, factors = torch.randn(rows, hidden), chosen_experts(rows), torch.rand(rows, TOP_K)
    found = experts(x, chosen, factors, gate)
    alone = [
        experts(x[i : i + 1], chosen[i : i + 1], factors[i : i + 1], gate)
        for i in range(min(rows, 12))
    ]
    assert torch.equal(found[:12], torch.cat(alone))
    expected = torch.zeros_like(x)
    for row in range(rows):
        for number, factor in zip(chosen[row].tolist(), factors[row], strict=True):
            rows_in = gate_reference((first[number] @ x[row])[None], kind)[0]
            expected[row] += factor * (last[number] @ rows_in)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)


def test_a_mixture_in_blocks_of_two_types() -> None:
    """As files of Q4_K_M have them: some tensors of each expert in Q6_K; in one stack each."""
    hidden, inner, rows = 256, 512, 3
    torch.manual_seed(1)
    gates, ups, downs = (
        [random_blocks(name, *shape) for _ in range(NUM_EXPERTS)]
        for name, shape in (
            *(("Q4_K", (inner, hidden)), ("Q4_K", (inner, hidden))),
            ("Q6_K", (hidden, inner)),
        )
    )
    linears = ExpertLinears()
    pairs = map(BlockWeight.stack, zip(gates, ups, strict=True))
    products = (
        [linears.packed(each.coded(), None, torch.float32) for each in part]
        for part in (pairs, downs)
    )
    first, last = ([each for each in part if each is not None] for part in products)
    experts = linears.experts(first, last, "silu")
    assert experts is not None
    assert (experts.gate_up.block_type, experts.down.block_type) == ("Q4_K", "Q6_K")
    x, chosen, factors = (
        torch.randn(rows, hidden) / 64,
        chosen_experts(rows),
        torch.rand(rows, TOP_K),
    )
    found = experts(x, chosen, factors, partial(gate_reference, kind="silu"))
    expected = torch.zeros_like(x)
    for row in range(rows):
        for number, factor in zip(chosen[row].tolist(), factors[row], strict=True):
            gate, up = (part[number].dequantize() @ x[row] for part in (gates, ups))
            inside = torch.nn.functional.silu(gate) * up
            expected[row] += factor * (downs[number].dequantize() @ inside)
    # Sums of products of sums, whose terms are up to the largest.
    assert (found - expected).abs().max() <= 2 * TOLERANCE[torch.float32] * expected.abs().max()
