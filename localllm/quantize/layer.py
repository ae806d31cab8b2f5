"""Quantize one layer to 3 or 4 bits, its linears in the order in which they compute.

Each group of linears is quantized with the inputs that the quantized ones before it produce ("true
sequential", as in the GPTQ authors' code), and towards the outputs of the unquantized model (Li et
al. 2025, "GPTAQ"; here in closed form, before the rounding).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from localllm.model.blocks.block import InputRows, InputsFrom, LinearGroup, Parts
from localllm.model.layer import LayerPlan, Place, Sublayer
from localllm.model.linear import ExpertByExpert, HeadsTogether, Linear, Projection
from localllm.model.norm import NormSpec
from localllm.model.packed.int4 import Int4Weight
from localllm.model.packed.weight import PackedWeight
from localllm.model.rope import RopeTable, RopeTables
from localllm.model.rope_config import RopeConfig
from localllm.quantize.awq import search_scales
from localllm.quantize.branches import Branches
from localllm.quantize.grid import relative_error
from localllm.quantize.inverse import DampedInverse
from localllm.quantize.moments import Moments
from localllm.quantize.quantized_layer import QuantizedLayer
from localllm.quantize.recipe import Recipe
from localllm.quantize.rounding import round_towards, round_weight
from localllm.quantize.stream import CalibrationStream
from localllm_kernels.linears import Linears
from localllm_kernels.pointwise.gate import GateKind

# Fewer rows than this say too little about an expert's inputs.
LEAST_ROWS = 128


@dataclass(frozen=True, slots=True)
class TensorParts(Parts):
    """The parts of a layer from `tensors`, named as in the checkpoint.

    With `linears`, products round weights and inputs to bfloat16 and add up in float32: that
    changes little beside what 4 bits change, and takes half the time.
    """

    tensors: Mapping[str, Tensor]
    ropes: RopeTables
    linears: Linears | None = None

    @classmethod
    def within(cls, tensors: Mapping[str, Tensor], stream: CalibrationStream) -> "TensorParts":
        """The parts of a layer that `stream` passes through."""
        return cls(tensors, stream.ropes, stream.ops.linears)

    def vector(self, name: str) -> Tensor:
        return self.tensors[name]

    def exact_vector(self, name: str) -> Tensor:
        return self.tensors[name].float()

    def linear(
        self,
        *names: str,
        order: Sequence[int] | None = None,
        columns: Sequence[int] | None = None,
    ) -> Projection:
        rows = slice(None) if order is None else torch.tensor(order)
        weight = torch.cat([self.tensors[f"{name}.weight"] for name in names])[rows]
        if columns is not None:
            weight = weight[:, torch.tensor(columns).argsort()]
        bias = None
        if f"{names[0]}.bias" in self.tensors:
            bias = torch.cat([self.tensors[f"{name}.bias"] for name in names])[rows]
        if self.linears is None:
            return Linear(weight, bias)
        return self.linears.plain(weight.to(torch.bfloat16, copy=True), bias)

    def heads(
        self, name: str, num_heads: int, rows: slice, *, is_transposed: bool = False
    ) -> HeadsTogether:
        weight = self.tensors[f"{name}.weight"]
        parts = weight.view(num_heads, -1, weight.shape[1])[:, rows]
        return HeadsTogether(parts if is_transposed else parts.transpose(1, 2))

    def experts(
        self, gate_up: Sequence[Sequence[str]], down: Sequence[Sequence[str]], kind: GateKind
    ) -> ExpertByExpert:
        first, last = (tuple(self.linear(*names) for names in each) for each in (gate_up, down))
        return ExpertByExpert(first, last)

    def rope(self, config: RopeConfig, width: int) -> RopeTable:
        return self.ropes.table(config, width)


class LayerQuantizer:
    """Quantizes one layer while the calibration tokens pass through it.

    The first of `streams` computes with the quantized layers before this one, the second with the
    unquantized ones. `tensors` are float32; those that stay plain are stored in `stored_dtype`.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        plan: LayerPlan,
        recipe: Recipe,
        stored_dtype: torch.dtype,
        streams: tuple[CalibrationStream, CalibrationStream],
    ) -> None:
        self._tensors, self._unquantized = dict(tensors), tensors
        self._plan, self._recipe, self._stored_dtype = plan, recipe, stored_dtype
        self._stream, self._reference = streams
        self._original = plan.build(TensorParts.within(tensors, self._reference))
        self._done: dict[str, PackedWeight] = {}
        self._errors: dict[str, float] = {}
        self._rows: dict[str, int] = {}

    def run(self) -> QuantizedLayer:
        """Quantize; leaves the first stream before the last block, the second behind the layer."""
        stream, reference = self._stream, self._reference
        for i, (place, original) in enumerate(
            zip(self._plan.places, self._original.sublayers, strict=True)
        ):
            if place.block.ends_in_product:
                first, *middle, last = (each for each in place.block.products if not each.is_kept)
                own, whole = stream.inputs(self._current(i)), reference.inputs(original)
                self._step(place, first, own, whole)
                for group in middle:
                    own, whole = stream.between(self._current(i)), reference.between(original)
                    self._step(place, group, own, whole)
                own, whole = stream.inner(self._current(i)), reference.inner(original)
                self._step(place, last, own, whole)
            else:
                self._quantize_branches(place, self._current(i))
            if i + 1 < len(self._plan.places):
                stream.add(self._current(i))
            reference.add(original)
        return QuantizedLayer(
            self._done,
            {
                name: tensor
                for name, tensor in self._tensors.items()
                if name.removesuffix(".weight") not in self._done
            },
            self._errors,
            self._rows,
        )

    def _quantize_branches(self, place: Place, current: Sublayer) -> None:
        original = self._unquantized.__getitem__
        branches = Branches(self._stream, self._reference, self._value, original)
        for step in branches.steps(current):
            if step.is_last:
                self._rows[step.group.names[-1]] = step.num_rows
            if step.num_rows < LEAST_ROWS:
                self._round(step.group)
            else:
                self._step(place, step.group, step.inputs, step.reference)

    def _round(self, group: LinearGroup) -> None:
        """Round to nearest: fitted to too few rows, a weight gets worse for others."""
        for name in group.names:
            weight = self._tensors[f"{name}.weight"]
            self._done[name] = round_weight(weight, self._recipe, self._stream.ops)
            self._errors[name] = relative_error(self._value(f"{name}.weight"), weight)

    def passed(self, written: Mapping[str, Tensor]) -> bool:
        """Whether the first stream passed the layer's earlier blocks with exactly the values of
        `written`, so that only the last block is left to add. (AWQ changes what it has passed.)
        """
        mine = self._values()
        return "awq" not in self._recipe.method and all(
            torch.equal(tensor, mine[name]) for name, tensor in written.items()
        )

    def _current(self, index: int) -> Sublayer:
        layer = self._plan.build(TensorParts.within(self._values(), self._stream))
        return layer.sublayers[index]

    def _value(self, name: str) -> Tensor:
        done = self._done.get(name.removesuffix(".weight"))
        return self._tensors[name] if done is None else done.dequantize(torch.float32)

    def _values(self) -> dict[str, Tensor]:
        return {name: self._value(name) for name in self._tensors}

    def _step(
        self,
        place: Place,
        group: LinearGroup,
        inputs: Iterator[Tensor],
        reference: Iterator[Tensor],
    ) -> None:
        recipe, names = self._recipe, group.names
        weight = torch.cat([self._tensors[f"{name}.weight"] for name in names])
        sizes = [len(self._tensors[f"{name}.weight"]) for name in names]
        retargets = recipe.feeds_back
        moments = Moments(weight, retargets=retargets)
        for x, whole in zip(inputs, reference, strict=True):
            moments.add(x, whole)
        hessian, inverse = moments.hessian, None
        if retargets:
            inverse = DampedInverse.of(hessian)
            weight = moments.retarget(inverse)
        if "awq" in recipe.method and self._can_fold(place, group):
            scales = self._fold_scales(place, group, weight, hessian, moments.magnitudes)
            weight, hessian = weight * scales, hessian / torch.outer(scales, scales)
            inverse = DampedInverse.of(hessian) if retargets else None
        rounded = round_towards(weight, recipe, hessian, inverse, self._stream.ops)
        error = weight - rounded.dequantize(torch.float32)
        lost = ((error @ hessian) * error).sum(1)
        power = ((weight @ hessian) * weight).sum(1)
        start = 0
        for name, size in zip(names, sizes, strict=True):
            rows = torch.arange(start, start + size, device=weight.device)
            self._done[name] = rounded.take_rows(rows)
            self._errors[name] = float(lost[rows].sum() / power[rows].sum().clamp(min=1e-30))
            start += size

    def _can_fold(self, place: Place, group: LinearGroup) -> bool:
        """Whether the operation before `group` can undo scales of its inputs alone."""
        if group.inputs is not InputsFrom.BLOCK:
            return isinstance(group.inputs, InputRows)
        readers = [each for each in place.block.products if each.inputs is InputsFrom.BLOCK]
        return place.norm is not None and not place.shares_input and len(readers) == 1

    def _fold_scales(
        self,
        place: Place,
        group: LinearGroup,
        weight: Tensor,
        hessian: Tensor,
        magnitudes: Tensor,
    ) -> Tensor:
        """AWQ's scales for the inputs of `group`, undone in the operation before it."""
        tie, rows = None, group.inputs if isinstance(group.inputs, InputRows) else None
        if rows is not None and rows.repeats > 1:
            tie = partial(_shared, rows=rows)
        scales = search_scales(
            weight,
            hessian,
            magnitudes,
            kind=self._recipe.grids,
            tie=tie,
        )
        if rows is None:
            assert place.norm is not None
            return self._divide_norm(place.norm, scales)
        self._divide_rows(rows, _by_input(scales, rows)[:, 0].flatten())
        self._stream.divide_inner(scales)
        return scales

    def _divide_norm(self, norm: NormSpec, divisors: Tensor) -> Tensor:
        """Divide a norm's weight; returns the divisors that are in effect after its rounding."""
        name = f"{norm.name}.weight"
        weight = self._tensors[name] + norm.offset
        stored = (weight / divisors - norm.offset).to(self._stored_dtype).float()
        self._tensors[name] = stored
        divided = stored + norm.offset
        return torch.where(divided == 0, divisors, weight / divided)

    def _divide_rows(self, rows: InputRows, divisors: Tensor) -> None:
        """Divide outputs of a quantized linear, by its groups' scales."""
        done, name = self._done[rows.linear], f"{rows.linear}.bias"
        part = slice(rows.first, rows.first + len(divisors))
        assert isinstance(done, Int4Weight)
        scales = done.scales.clone()
        scales[part] = (scales[part].float() / divisors[:, None]).bfloat16()
        self._done[rows.linear] = replace(done, scales=scales)
        if name in self._tensors:
            bias = self._tensors[name].clone()
            bias[part] = (bias[part] / divisors).to(self._stored_dtype).float()
            self._tensors[name] = bias


def _by_input(values: Tensor, rows: InputRows) -> Tensor:
    return values.view(rows.groups, rows.repeats, rows.width)


def _shared(values: Tensor, rows: InputRows) -> Tensor:
    """For each input, the mean over all inputs that are the same output of a linear."""
    grouped = _by_input(values, rows)
    return grouped.mean(1, keepdim=True).expand_as(grouped).flatten()
