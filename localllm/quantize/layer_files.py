"""The quantized layers as parts of a work folder: written, and read back as they will be used."""

from dataclasses import replace

import torch
from torch import Tensor

from localllm.model.architecture import layer_name
from localllm.model.packed.int4 import Int4Weight
from localllm.model.packed.int8 import Int8Weight
from localllm.model.packed.scheme import Scheme
from localllm.model.packed.weight import PackedWeight
from localllm.quantize.layer import QuantizedLayer
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


def write_layer(
    work: WorkFolder, index: int, layer: QuantizedLayer, scheme: Scheme, dtype: torch.dtype
) -> None:
    """Write layer `index` with its errors; plain tensors are written in `dtype`."""
    prefix = f"{layer_name(index)}."
    tensors = {f"{prefix}{name}": tensor.to(dtype) for name, tensor in layer.plain.items()}
    for linear, weight in layer.weights.items():
        tensors |= stored_tensors(f"{prefix}{linear}", weight, scheme, dtype)
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


def read_rows(work: WorkFolder, index: int) -> dict[str, int]:
    """The calibration's rows that each expert of layer `index` saw, by its last linear."""
    rows: dict[str, int] = work.notes(part_name(index))["rows"]
    return rows


def read_errors(work: WorkFolder, index: int) -> dict[str, float]:
    """The errors of the linears of layer `index`, by their names within the layer."""
    errors: dict[str, float] = work.notes(part_name(index))["errors"]
    return errors
