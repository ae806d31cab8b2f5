"""One layer, from its tensors to their int4 form, in the order in which they compute.

Each group of linears is quantized with the inputs that the quantized ones before it give ("true
sequential", as in the code of GPTQ's authors), and towards the outputs that the whole model has
(Li et al. 2025, "GPTAQ": here in closed form, before the rounding).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from localllm.model.blocks.block import InputRows, LinearGroup
from localllm.model.layer import LayerPlan, Place, Sublayer
from localllm.model.linear import Linear
from localllm.model.packed.weight import PackedWeight
from localllm.model.rope import RopeTable, RopeTables
from localllm.model.rope_config import RopeConfig
from localllm.quantize.awq import search_scales
from localllm.quantize.gptq import round_columns
from localllm.quantize.grid import Grid, fit_grid
from localllm.quantize.moments import Moments
from localllm.quantize.recipe import Recipe
from localllm.quantize.stream import CalibrationStream


@dataclass(frozen=True, slots=True)
class TensorParts:
    """The parts of a layer from `tensors`, which are named as in the checkpoint; see Parts."""

    tensors: Mapping[str, Tensor]
    ropes: RopeTables

    def vector(self, name: str) -> Tensor:
        """See Parts."""
        return self.tensors[name]

    def linear(self, *names: str) -> Linear:
        """See Parts."""
        weight = torch.cat([self.tensors[f"{name}.weight"] for name in names])
        if f"{names[0]}.bias" not in self.tensors:
            return Linear(weight)
        return Linear(weight, torch.cat([self.tensors[f"{name}.bias"] for name in names]))

    def rope(self, config: RopeConfig, width: int) -> RopeTable:
        """See Parts."""
        return self.ropes.table(config, width)


@dataclass(slots=True)
class _Rounded:
    """A linear that is done: its codes on their grid."""

    grid: Grid
    codes: Tensor


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """The result: weights by linear, everything else by tensor name, and how far off it is.

    `errors`: of each linear, the squared error of its output over its squared output.
    """

    weights: Mapping[str, PackedWeight]
    plain: dict[str, Tensor]
    errors: dict[str, float]


class LayerQuantizer:
    """Quantizes one layer while the calibration tokens pass through it.

    The first of `streams` computes with the quantized layers before this one, the second with the
    whole ones. `tensors` are float32, and those that stay plain are written in `stored_dtype`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        plan: LayerPlan,
        recipe: Recipe,
        stored_dtype: torch.dtype,
        streams: tuple[CalibrationStream, CalibrationStream],
    ) -> None:
        self._tensors = dict(tensors)
        self._plan, self._recipe, self._stored_dtype = plan, recipe, stored_dtype
        self._stream, self._reference = streams
        self._original = plan.build(TensorParts(tensors, self._reference.ropes))
        self._done: dict[str, _Rounded] = {}
        self._errors: dict[str, float] = {}

    def run(self) -> QuantizedLayer:
        """Quantize; the first stream then stands before the layer's last block, the second before
        the next layer.
        """
        stream, reference = self._stream, self._reference
        for i, (place, original) in enumerate(
            zip(self._plan.places, self._original.sublayers, strict=True)
        ):
            first, last = place.block.products
            self._step(place, first, stream.inputs(self._current(i)), reference.inputs(original))
            self._step(place, last, stream.inner(self._current(i)), reference.inner(original))
            if i + 1 < len(self._plan.places):
                stream.add(self._current(i))
            reference.add(original)
        return QuantizedLayer(
            {name: each.grid.weight(each.codes) for name, each in self._done.items()},
            {
                name: tensor
                for name, tensor in self._tensors.items()
                if name.removesuffix(".weight") not in self._done
            },
            self._errors,
        )

    def passed(self, written: Mapping[str, Tensor]) -> bool:
        """Whether the first stream has come into the layer through `written`, so that only its last
        block is left to add. (AWQ changes what it has passed.)
        """
        mine = self._values()
        return "awq" not in self._recipe.method and all(
            torch.equal(tensor, mine[name]) for name, tensor in written.items()
        )

    def _current(self, index: int) -> Sublayer:
        """A block as far as it is done."""
        layer = self._plan.build(TensorParts(self._values(), self._stream.ropes))
        return layer.sublayers[index]

    def _values(self) -> dict[str, Tensor]:
        values = {
            f"{name}.weight": each.grid.values(each.codes) for name, each in self._done.items()
        }
        return {**self._tensors, **values}

    def _step(
        self,
        place: Place,
        group: LinearGroup,
        inputs: Iterator[Tensor],
        reference: Iterator[Tensor],
    ) -> None:
        """Quantize the linears of `group`, which read the same inputs."""
        recipe, names = self._recipe, group.names
        weight = torch.cat([self._tensors[f"{name}.weight"] for name in names])
        sizes = [len(self._tensors[f"{name}.weight"]) for name in names]
        moments = Moments(weight.shape[1], weight.device)
        for x, whole in zip(inputs, reference, strict=True):
            moments.add(x, whole)
        hessian, scales = moments.hessian, torch.ones(weight.shape[1], device=weight.device)
        if "gptq" in recipe.method:
            weight = moments.retarget(weight)
        if "awq" in recipe.method:
            scales = self._fold_scales(place, group, weight, hessian, moments.magnitudes)
        scaled, scaled_hessian = weight * scales, hessian / torch.outer(scales, scales)
        grid = fit_grid(
            scaled,
            recipe.group_size,
            symmetric=recipe.symmetric,
            hessian=None if recipe.method == "rtn" else scaled_hessian,
        )
        if "gptq" in recipe.method:
            codes = round_columns(scaled, scaled_hessian, grid)
        else:
            codes = grid.round(scaled)
        error = scaled - grid.values(codes)
        lost = ((error @ scaled_hessian) * error).sum(1)
        power = ((scaled @ scaled_hessian) * scaled).sum(1)
        start = 0
        for name, size in zip(names, sizes, strict=True):
            rows = slice(start, start + size)
            own_grid = Grid(grid.scales[rows], grid.zeros[rows], grid.symmetric)
            self._done[name] = _Rounded(own_grid, codes[rows])
            self._errors[name] = float(lost[rows].sum() / power[rows].sum().clamp(min=1e-30))
            start += size

    def _fold_scales(
        self,
        place: Place,
        group: LinearGroup,
        weight: Tensor,
        hessian: Tensor,
        magnitudes: Tensor,
    ) -> Tensor:
        """AWQ's scales for the inputs of `group`, undone in the operation before it."""
        rows, tie = group.inputs, None
        if rows is not None and rows.repeats > 1:
            tie = partial(_shared, rows=rows)
        scales = search_scales(
            weight,
            hessian,
            magnitudes,
            group_size=self._recipe.group_size,
            symmetric=self._recipe.symmetric,
            tie=tie,
        )
        if rows is None:
            return self._divide_norm(f"{place.norm}.weight", scales)
        self._divide_rows(rows.linear, _by_input(scales, rows)[:, 0].flatten())
        self._stream.divide_inner(scales)
        return scales

    def _divide_norm(self, name: str, divisors: Tensor) -> Tensor:
        """Divide a norm's weight; returns the divisors that its rounding really made of them."""
        weight = self._tensors[name]
        divided = (weight / divisors).to(self._stored_dtype).float()
        self._tensors[name] = divided
        return torch.where(divided == 0, divisors, weight / divided)

    def _divide_rows(self, name: str, divisors: Tensor) -> None:
        """Divide the outputs of a linear that is done: its groups' scales take it up."""
        done = self._done[name]
        scales = (done.grid.scales / divisors[:, None]).bfloat16().float()
        self._done[name] = _Rounded(replace(done.grid, scales=scales), done.codes)
        bias = f"{name}.bias"
        if bias in self._tensors:
            divided = self._tensors[bias] / divisors
            self._tensors[bias] = divided.to(self._stored_dtype).float()


def _by_input(values: Tensor, rows: InputRows) -> Tensor:
    return values.view(rows.groups, rows.repeats, rows.width)


def _shared(values: Tensor, rows: InputRows) -> Tensor:
    """The mean over the inputs that are the same output of a linear, for each of them."""
    grouped = _by_input(values, rows)
    return grouped.mean(1, keepdim=True).expand_as(grouped).flatten()
