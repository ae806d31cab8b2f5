"""The quantized layers as parts of a work folder: written, and read back as they will be used."""

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from localllm.model.architecture import layer_name
from localllm.model.layer import LayerPlan
from localllm.model.packed.int4 import Int4Weight
from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.scheme import Scheme
from localllm.model.packed.weight import PackedWeight
from localllm.model.weight_check import WeightMap
from localllm.quantize.quantized_layer import QuantizedLayer
from localllm.quantize.work_folder import WorkFolder


def part_name(index: int) -> str:
    """The part that holds layer `index`."""
    return f"layer-{index:05}"


def stored_tensors(
    linear: str, weight: PackedWeight, scheme: Scheme, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors that a file holds for a linear; integer weights have scales in `dtype`."""
    if isinstance(weight, (Int4Weight, Int8Weight)):
        weight = replace(weight, scales=weight.scales.to(dtype))
    return {f"{linear}.{suffix}": tensor for suffix, tensor in scheme.write(weight).items()}


def exact_vectors(source: WeightMap, index: int, plan: LayerPlan) -> set[str]:
    """The vectors of the blocks of layer `index` that its files hold in float32, by name within the
    layer. They stay so: of an expert's correction, a narrower dtype would change the choice.
    """
    prefix = f"{layer_name(index)}."
    return {name for name in plan.vectors() if source.plain[f"{prefix}{name}"].dtype == "F32"}


def stored_layer(
    prefix: str, layer: QuantizedLayer, scheme: Scheme, dtype: torch.dtype, exact: Collection[str]
) -> dict[str, Tensor]:
    """The tensors that files hold for a layer, whose names begin with `prefix`: plain ones in
    `dtype`, but those of `exact` in float32.
    """
    tensors = {
        f"{prefix}{name}": tensor.to(torch.float32 if name in exact else dtype)
        for name, tensor in layer.plain.items()
    }
    for linear, weight in layer.weights.items():
        tensors |= stored_tensors(f"{prefix}{linear}", weight, scheme, dtype)
    return tensors


def write_layer(
    work: WorkFolder,
    index: int,
    layer: QuantizedLayer,
    scheme: Scheme,
    dtype: torch.dtype,
    exact: Collection[str],
) -> None:
    """Write layer `index`; its notes are `errors` and `rows`, see QuantizedLayer. `exact`, `dtype`:
    see `stored_layer`.
    """
    tensors = stored_layer(f"{layer_name(index)}.", layer, scheme, dtype, exact)
    work.write(part_name(index), tensors, {"errors": layer.errors, "rows": layer.rows})


def read_layer(
    work: WorkFolder, index: int, scheme: Scheme, device: torch.device
) -> dict[str, Tensor]:
    """The tensors of layer `index` in float32, dequantized, by their names within the layer."""
    prefix = f"{layer_name(index)}."
    stored = {
        name.removeprefix(prefix): tensor.to(device)
        for name, tensor in work.read(part_name(index)).items()
    }
    marker = f".{scheme.marker}"
    tensors: dict[str, Tensor] = {}
    for linear in [name.removesuffix(marker) for name in stored if name.endswith(marker)]:
        own = [n for n in stored if n.startswith(f"{linear}.") and not n.endswith(".bias")]
        parts = {name.removeprefix(f"{linear}."): stored.pop(name) for name in own}
        tensors[f"{linear}.weight"] = scheme.read(parts).dequantize(torch.float32)
    return tensors | {name: tensor.float() for name, tensor in stored.items()}
