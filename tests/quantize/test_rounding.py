"""Grids, GPTQ and AWQ on single weights, against plain statements of what they minimise."""

from typing import Any

import pytest
import torch
from torch import Tensor

from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.mxfp4 import VALUES
from localllm.model.packed.nvfp4 import Nvfp4Weight
from localllm.model.packed.trellis import TrellisWeight
from localllm.quantize import trellis
from localllm.quantize.awq import NUM_OUTPUTS, normalised, output_error, search_scales
from localllm.quantize.gptq import round_columns
from localllm.quantize.grid import fit_grid
from localllm.quantize.integer_grid import IntegerGrids
from localllm.quantize.inverse import DAMPING, DampedInverse
from localllm.quantize.recipe import Recipe
from localllm.quantize.rounding import round_fp8, round_weight
from localllm.quantize.trellis import round_trellis

OUT, IN, GROUP = 24, 96, 32


def weight_and_hessian(
    seed: int = 0, outliers: int = 0, num_rows: int = 2000
) -> tuple[Tensor, Tensor]:
    """A weight, and the second moments of correlated inputs."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(OUT, IN, generator=generator)
    mix = torch.randn(IN, IN, generator=generator) / IN**0.5 + torch.eye(IN)
    x = torch.randn(num_rows, IN, generator=generator) @ mix
    x[:, :outliers] *= 20
    return weight, x.T @ x / len(x)


def lost(weight: Tensor, values: Tensor, hessian: Tensor) -> float:
    error = weight - values
    return float(((error @ hessian) * error).sum())


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_grid_covers_its_groups(symmetric: bool) -> None:
    weight, _ = weight_and_hessian()
    weight[3, :GROUP] = 0
    weight[4, :GROUP] = weight[4, :GROUP].abs() + 5
    grid = fit_grid(weight, IntegerGrids(GROUP, symmetric=symmetric))
    codes = grid.round(weight)
    assert codes.min() >= 0
    assert codes.max() <= 15
    assert torch.equal(codes, codes.round())
    steps = grid.scales.repeat_interleave(GROUP, 1)
    # Half a step; the outermost code may be half a step further, and scales are rounded.
    assert ((weight - grid.values(codes)).abs() <= 1.05 * steps).all()
    assert (grid.values(codes)[3, :GROUP] == 0).all()
    assert torch.equal(grid.scales, grid.scales.bfloat16().float())
    assert torch.equal(grid.weight(codes).dequantize(torch.float32), grid.values(codes))
    if symmetric:
        assert (grid.zeros == 8).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_makes_no_group_worse(symmetric: bool) -> None:
    weight, hessian = weight_and_hessian()
    weight[:, ::GROUP] *= 6  # outliers
    # Groups see only their own inputs, so the sum is over blocks of the diagonal.
    blocks = torch.block_diag(*(hessian[i : i + GROUP, i : i + GROUP] for i in range(0, IN, GROUP)))
    whole = fit_grid(weight, IntegerGrids(GROUP, symmetric=symmetric))
    fitted = fit_grid(weight, IntegerGrids(GROUP, symmetric=symmetric), hessian)
    before = lost(weight, whole.values(whole.round(weight)), blocks)
    after = lost(weight, fitted.values(fitted.round(weight)), blocks)
    assert after < 0.95 * before


def test_a_symmetric_grid_reaches_further_on_the_side_that_needs_it() -> None:
    weight = torch.rand(64, GROUP) * 1.6 - 0.8
    weight[:, 0] = 1.0  # eight steps, where there are only seven below
    fitted = fit_grid(weight, IntegerGrids(GROUP, symmetric=True), torch.eye(GROUP))
    assert (fitted.scales < 0).float().mean() > 0.9
    opposite = fit_grid(-weight, IntegerGrids(GROUP, symmetric=True), torch.eye(GROUP))
    assert (opposite.scales > 0).float().mean() > 0.9
    codes = fitted.round(weight)
    assert torch.equal(fitted.weight(codes).dequantize(torch.float32), fitted.values(codes))


def naive_gptq(weight: Tensor, hessian: Tensor, grid_of: object, order: Tensor) -> Tensor:
    """The paper's equations 2 and 3, with the inverse over the remaining columns made anew."""
    weight, hessian = weight.double(), hessian.double()
    grid = grid_of
    codes = torch.zeros_like(weight)
    remaining = order.tolist()
    while remaining:
        column = remaining[0]
        inverse = torch.linalg.inv(hessian[remaining][:, remaining])
        group = column // GROUP
        scale, zero = grid.scales[:, group].double(), grid.zeros[:, group].double()  # type: ignore[attr-defined]
        code = (torch.round(weight[:, column] / scale) + zero).clamp(0, 15)
        codes[:, column] = code
        error = (weight[:, column] - (code - zero) * scale) / inverse[0, 0]
        weight[:, remaining] -= torch.outer(error, inverse[0])
        remaining = remaining[1:]
    return codes.float()


@pytest.mark.parametrize("width", [96, 700, 1100])  # inverted at once, in halves, in quarters
def test_the_inverse_of_damped_moments(width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2 * width, width, generator=generator) * torch.arange(1, width + 1)
    hessian = x.T @ x / len(x)
    damped = hessian.double() + DAMPING * hessian.diagonal().mean() * torch.eye(width)
    inverse = DampedInverse.of(hessian)
    expected = torch.linalg.inv(damped)
    ordered = (inverse.factor.T @ inverse.factor).double()
    most = expected.abs().max()
    assert (hessian.diagonal()[inverse.order].diff() <= 0).all()
    assert (ordered - expected[inverse.order][:, inverse.order]).abs().max() < 1e-5 * most
    assert torch.equal(inverse.factor, inverse.factor.triu())
    rows = torch.randn(5, width, generator=generator)
    wanted = rows.double() @ expected
    assert (inverse.times(rows) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_gptq_is_what_the_paper_says() -> None:
    weight, hessian = weight_and_hessian()
    grid = fit_grid(weight, IntegerGrids(GROUP, symmetric=False))
    codes = round_columns(weight, DampedInverse.of(hessian), grid)
    damped = hessian + DAMPING * hessian.diagonal().mean() * torch.eye(IN)
    order = torch.argsort(hessian.diagonal(), descending=True)
    expected = naive_gptq(weight, damped, grid, order)
    # A value half-way between two codes may fall to either side.
    assert (codes != expected).float().mean() < 0.002


@pytest.mark.parametrize("symmetric", [True, False])
def test_gptq_beats_rounding_to_nearest(symmetric: bool) -> None:
    weight, hessian = weight_and_hessian()
    grid = fit_grid(weight, IntegerGrids(GROUP, symmetric=symmetric))
    nearest = lost(weight, grid.values(grid.round(weight)), hessian)
    codes = round_columns(weight, DampedInverse.of(hessian), grid)
    rounded = lost(weight, grid.values(codes), hessian)
    assert rounded < 0.65 * nearest


def test_damping_keeps_a_weight_from_fitting_to_few_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many inputs as the weight is wide, of which a loss on all others is measured."""
    losses = []
    for damping in (DAMPING / 10, DAMPING, 100 * DAMPING):
        monkeypatch.setattr("localllm.quantize.inverse.DAMPING", damping)
        total = 0.0
        for seed in range(4):
            weight, hessian = weight_and_hessian(seed)
            few = weight_and_hessian(seed, num_rows=IN)[1]
            grid = fit_grid(weight, IntegerGrids(GROUP, symmetric=False))
            codes = round_columns(weight, DampedInverse.of(few), grid)
            total += lost(weight, grid.values(codes), hessian)
        losses.append(total)
    least, own, most = losses
    assert own < 0.9 * least
    assert own < most


def test_gptq_without_correlation_rounds_to_nearest() -> None:
    weight, _ = weight_and_hessian()
    grid = fit_grid(weight, IntegerGrids(GROUP, symmetric=False))
    assert torch.equal(
        round_columns(weight, DampedInverse.of(torch.eye(IN)), grid), grid.round(weight)
    )


def test_inputs_that_are_always_zero_or_the_same_do_no_harm() -> None:
    weight, hessian = weight_and_hessian()
    hessian[:, 5] = hessian[5] = 0
    hessian[:, 7], hessian[7] = hessian[:, 8].clone(), hessian[8].clone()
    for moments in (hessian, torch.zeros(IN, IN)):
        grid = fit_grid(weight, IntegerGrids(GROUP, symmetric=False), moments)
        codes = round_columns(weight, DampedInverse.of(moments), grid)
        assert torch.isfinite(grid.values(codes)).all()
        assert (weight - grid.values(codes)).abs().max() < 5


def test_awq_finds_the_channels_that_matter() -> None:
    weight, hessian = weight_and_hessian(outliers=4)
    magnitudes = hessian.diagonal().sqrt()
    scales = search_scales(weight, hessian, magnitudes, kind=IntegerGrids(GROUP, symmetric=False))
    plain = output_error(weight, torch.ones(IN), hessian, IntegerGrids(GROUP, symmetric=False))
    assert output_error(weight, scales, hessian, IntegerGrids(GROUP, symmetric=False)) < 0.7 * plain
    assert scales[:4].min() > scales[4:].mean()


def test_awq_searches_with_some_outputs_of_many(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    _, hessian = weight_and_hessian(outliers=4)
    # Heads, in each of which one row out of 64 is large.
    weight = torch.randn(64 * NUM_OUTPUTS, IN, generator=generator)
    weight[::64] *= 10
    magnitudes, errors = hessian.diagonal().sqrt(), []
    for most in (NUM_OUTPUTS, len(weight)):
        monkeypatch.setattr("localllm.quantize.awq.NUM_OUTPUTS", most)
        scales = search_scales(
            weight, hessian, magnitudes, kind=IntegerGrids(GROUP, symmetric=True)
        )
        errors.append(output_error(weight, scales, hessian, IntegerGrids(GROUP, symmetric=True)))
    assert errors[0] < 1.02 * errors[1]


def test_scales_that_have_to_be_equal_are() -> None:
    weight, hessian = weight_and_hessian(outliers=4)
    scales = search_scales(
        weight,
        hessian,
        hessian.diagonal().sqrt(),
        kind=IntegerGrids(GROUP, symmetric=False),
        tie=lambda values: values.view(2, -1).mean(0).repeat(2),
    )
    assert torch.equal(scales[: IN // 2], scales[IN // 2 :])
    extremes = normalised(torch.tensor([0.0, 1.0, 100.0]))
    assert torch.isfinite(extremes).all()
    assert float(extremes.min() * extremes.max()) == pytest.approx(1)


def test_mxfp4_takes_the_nearest_values_of_the_better_power_of_two() -> None:
    weight, _ = weight_and_hessian()
    weight = weight[:, : IN // 32 * 32].clone()
    weight[2], weight[3, 0] = 0, 5.0
    found = round_weight(weight, Recipe("mxfp4"))
    values = torch.tensor(VALUES)
    errors = []
    for exponent in range(90, 140):
        grid = values * 2.0 ** (exponent - 127)
        nearest = (weight[..., None] - grid).abs().amin(-1)
        errors.append(nearest.view(len(weight), -1, 32).square().sum(2))
    own = (found.dequantize(torch.float32) - weight).view(len(weight), -1, 32).square().sum(2)
    torch.testing.assert_close(own, torch.stack(errors).amin(0))
    assert (found.dequantize() == 0)[2].all()


def test_mxfp4_rounds_ties_to_even_codes() -> None:
    row = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)
    found = round_weight(torch.stack((row, -row)), Recipe("mxfp4")).dequantize(torch.float32)
    expected = torch.tensor([0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0] * 4)
    assert torch.equal(found, torch.stack((expected, -expected)))


def test_nvfp4_takes_the_best_of_the_scales_that_it_tries() -> None:
    weight, _ = weight_and_hessian()
    weight[2], weight[3, 0] = 0, 5.0
    found = round_weight(weight, Recipe("nvfp4"))
    assert isinstance(found, Nvfp4Weight)
    # The tensor's largest value, and so the largest scale, are reached.
    assert float(found.divisors[0]) == pytest.approx(6 * 448 / 5)
    error = (found.dequantize(torch.float32) - weight).view(OUT, -1, 16).square().sum(2)
    values, most = torch.tensor(VALUES), weight.view(OUT, -1, 16).abs().amax(2) / 6
    for of_share in (1.0, 0.8, 1.5):
        scales = (most * of_share * found.divisors[0]).clamp(2**-9, 448).to(torch.float8_e4m3fn)
        grid = values * (scales.float() / found.divisors[0])[:, :, None, None]
        nearest = (weight.view(OUT, -1, 16, 1) - grid).abs().amin(-1)
        assert (error <= nearest.square().sum(2) * (1 + 1e-5) + 1e-9).all()
    assert (found.dequantize() == 0)[2].all()


@pytest.mark.parametrize("method", ["mxfp4", "nvfp4"])
def test_floats_lose_less_with_the_error_fed_back(method: Any) -> None:
    weight, hessian = weight_and_hessian()
    recipe = Recipe(method)
    grid = fit_grid(weight, recipe.grids, hessian)
    nearest = grid.values(grid.round(weight))
    codes = round_columns(weight, DampedInverse.of(hessian), grid)
    assert lost(weight, grid.values(codes), hessian) < 0.75 * lost(weight, nearest, hessian)
    assert torch.equal(grid.weight(codes).dequantize(torch.float32), grid.values(codes))


def test_a_trellis_of_3_bits_loses_less_with_the_error_fed_back() -> None:
    """About as much as its distance from the whole numbers of 4 bits, without scales of groups."""
    weight, hessian = weight_and_hessian()
    weight[2] = 0
    recipe = Recipe("trellis")
    nearest = round_weight(weight, recipe).dequantize(torch.float32)
    found = round_trellis(weight, hessian)
    fed_back = found.dequantize(torch.float32)
    assert lost(weight, fed_back, hessian) < 0.75 * lost(weight, nearest, hessian)
    assert (nearest - weight).norm() < 0.16 * weight.norm()
    assert (nearest[2] == 0).all()
    assert (fed_back[2] == 0).all()
    # No other scale of a row is better.
    for factor in (0.99, 1.01):
        other = TrellisWeight(found.codes, found.scales * factor).dequantize(torch.float32)
        errors = ((each - weight) for each in (fed_back, other))
        own, others = (((e @ hessian) * e).sum(1) for e in errors)
        assert (own <= others).all()


def test_a_trellis_looks_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = weight_and_hessian()
    found = [round_trellis(weight, hessian)]
    monkeypatch.setattr(trellis, "_AHEAD", 0)
    found.append(round_trellis(weight, hessian))
    ahead, blind = (lost(weight, each.dequantize(torch.float32), hessian) for each in found)
    assert ahead < 0.95 * blind


def test_files_in_3_bits_keep_their_meaning() -> None:
    """The table, the order of the bits, the signs and what is mixed."""
    codes = (torch.arange(2 * 144) * 37 % 256).byte().view(2, 144)
    weight = TrellisWeight(codes, torch.tensor([1.0, 0.5])).dequantize(torch.float32)
    assert weight[0, :3].tolist() == pytest.approx([4.4194174, -7.8665628, -3.8890872])
    assert weight[1, -2:].tolist() == pytest.approx([15.4237661, 19.8431835])
    assert float(weight.double().square().sum()) == pytest.approx(267312.7407)


def test_int8_and_fp8_are_near() -> None:
    weight, _ = weight_and_hessian()
    weight[2] = 0
    for quantized, tolerance in (
        (Int8Weight.rounded(weight), 0.01),
        (round_fp8(weight, (1, IN)), 0.04),
        (round_fp8(weight, (16, 64)), 0.04),  # blocks that the weight does not fill
    ):
        values = quantized.dequantize(torch.float32)
        assert (values - weight).norm() < tolerance * weight.norm()
        assert (values[2] == 0).all()
    nearest = round_weight(weight, Recipe(method="rtn", group_size=32))
    assert (nearest.dequantize(torch.float32) - weight).norm() < 0.12 * weight.norm()
