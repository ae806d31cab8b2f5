"""One layer, from its tensors to their int4 form, in the order in which they compute.

Each group of linears is quantized with the inputs that the quantized ones before it give ("true
sequential", as in the code of GPTQ's authors), and towards the outputs that the whole model has
(Li et al. 2025, "GPTAQ": here in closed form, before the rounding).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from localllm.model.config import ModelConfig
from localllm.model.layers import DOWN, GATE_UP, OUTPUT, QKV, DecoderLayer, build_layer
from localllm.model.linear import Linear
from localllm.model.quantized import QuantizedWeight
from localllm.quantize.awq import search_scales
from localllm.quantize.gptq import round_columns
from localllm.quantize.grid import Grid, fit_grid
from localllm.quantize.moments import Moments
from localllm.quantize.recipe import Recipe
from localllm.quantize.stream import CalibrationStream


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What a layer needs besides its tensors."""

    config: ModelConfig
    window: int | None

    def build(self, tensors: Mapping[str, Tensor]) -> DecoderLayer:
        """A layer that computes with `tensors`, which are named as in the checkpoint."""

        def linear(names: tuple[str, ...]) -> Linear:
            weight = torch.cat([tensors[f"{name}.weight"] for name in names])
            if f"{names[0]}.bias" not in tensors:
                return Linear(weight)
            return Linear(weight, torch.cat([tensors[f"{name}.bias"] for name in names]))

        return build_layer(
            self.config,
            self.window,
            norm_weight=lambda name: tensors[f"{name}.weight"],
            linear=linear,
            has_head_norms="self_attn.q_norm.weight" in tensors,
        )


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

    weights: Mapping[str, QuantizedWeight]
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
        shape: LayerShape,
        recipe: Recipe,
        stored_dtype: torch.dtype,
        streams: tuple[CalibrationStream, CalibrationStream],
    ) -> None:
        self._tensors = dict(tensors)
        self._original = shape.build(tensors)
        self._shape, self._recipe, self._stored_dtype = shape, recipe, stored_dtype
        self._stream, self._reference = streams
        self._done: dict[str, _Rounded] = {}
        self._errors: dict[str, float] = {}

    def run(self) -> QuantizedLayer:
        """Quantize; the first stream then stands within this layer, the second before the next."""
        stream, reference, original = self._stream, self._reference, self._original
        self._step(
            QKV, stream.attention_inputs(self._current()), reference.attention_inputs(original)
        )
        self._step(OUTPUT, stream.attended(self._current()), reference.attended(original))
        stream.add_attention(self._current())
        reference.add_attention(original)
        self._step(GATE_UP, stream.mlp_inputs(self._current()), reference.mlp_inputs(original))
        self._step(DOWN, stream.activations(self._current()), reference.activations(original))
        reference.add_mlp(original)
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
        """Whether the first stream has come into the layer through `written`, so that only its
        feed-forward is left to add. (AWQ changes what it has passed.)
        """
        mine = self._values()
        return "awq" not in self._recipe.method and all(
            torch.equal(tensor, mine[name]) for name, tensor in written.items()
        )

    def _current(self) -> DecoderLayer:
        """The layer as far as it is done."""
        return self._shape.build(self._values())

    def _values(self) -> dict[str, Tensor]:
        values = {
            f"{name}.weight": each.grid.values(each.codes) for name, each in self._done.items()
        }
        return {**self._tensors, **values}

    def _step(
        self, names: tuple[str, ...], inputs: Iterator[Tensor], reference: Iterator[Tensor]
    ) -> None:
        """Quantize the linears `names`, which read the same input."""
        recipe = self._recipe
        weight = torch.cat([self._tensors[f"{name}.weight"] for name in names])
        sizes = [len(self._tensors[f"{name}.weight"]) for name in names]
        moments = Moments(weight.shape[1], weight.device)
        for x, whole in zip(inputs, reference, strict=True):
            moments.add(x, whole)
        hessian, scales = moments.hessian, torch.ones(weight.shape[1], device=weight.device)
        if "gptq" in recipe.method:
            weight = moments.retarget(weight)
        if "awq" in recipe.method:
            scales = self._fold_scales(names, weight, hessian, moments.magnitudes)
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
        self, names: tuple[str, ...], weight: Tensor, hessian: Tensor, magnitudes: Tensor
    ) -> Tensor:
        """AWQ's scales for the input of `names`, undone in the operation before it."""
        scales = search_scales(
            weight,
            hessian,
            magnitudes,
            group_size=self._recipe.group_size,
            symmetric=self._recipe.symmetric,
            tie=self._shared_over_heads if names == OUTPUT else None,
        )
        if names == QKV:
            scales = self._divide_norm("input_layernorm.weight", scales)
        elif names == GATE_UP:
            scales = self._divide_norm("post_attention_layernorm.weight", scales)
        elif names == OUTPUT:
            self._divide_rows("self_attn.v_proj", self._of_value_rows(scales))
            self._stream.divide_attended(scales)
        else:
            self._divide_rows("mlp.up_proj", scales)
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

    def _grouped(self, values: Tensor) -> Tensor:
        """`values` [heads · head_dim] as [kv_heads, heads of a group, head_dim]."""
        config = self._shape.config
        return values.view(config.num_kv_heads, -1, config.head_dim)

    def _shared_over_heads(self, values: Tensor) -> Tensor:
        """The mean over the heads that read the same values, for each of them."""
        grouped = self._grouped(values)
        return grouped.mean(1, keepdim=True).expand_as(grouped).flatten()

    def _of_value_rows(self, scales: Tensor) -> Tensor:
        """Shared scales [heads · head_dim] as those of the value projection's rows."""
        return self._grouped(scales)[:, 0].flatten()
