"""Estimates of the size of the result and of the time to make it, before anything is done."""

import time
from dataclasses import dataclass

import torch

from localllm.model.architecture import Architecture
from localllm.quantize.awq import NUM_RATIOS
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.recipe import Recipe
from localllm.quantize.source import CheckedFolder, result_bytes

_PROBE = 1024
_PASSES = 4.0  # through the layers: source and quantized, gate and up twice more
# The share of a large product's rate that generating text reaches, in a batch of some tens; and the
# seconds per token that Python, attention and sampling add. Measured on two cores, 2026-11.
_WRITING_SHARE, _WRITTEN_TOKEN_S = 0.45, 2.5e-4
# Loading, measuring, and other constant costs.
_FIXED_S = 5.0


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of the weights, and an estimate of the seconds to quantize them here."""

    source_bytes: int
    result_bytes: int
    seconds: float


def estimate(
    source: CheckedFolder, recipe: Recipe, asked: CalibrationRequest, device: torch.device
) -> Estimate:
    """The sizes of a checkpoint and of its quantized result, and `quantize_seconds`."""
    num_bytes = sum(info.num_bytes for info in source.weights.plain.values())
    seconds = quantize_seconds(source.architecture, recipe, asked, device)
    return Estimate(num_bytes, result_bytes(source, recipe), seconds)


def quantize_seconds(
    architecture: Architecture,
    recipe: Recipe,
    asked: CalibrationRequest,
    device: torch.device,
) -> float:
    """Seconds from the number of operations and the rate of a product measured here.

    Includes the calibration text that a model generates, but no download.
    """
    groups = [group for _, group in architecture.groups()]
    weights = sum(group.width_out * group.width_in for group in groups)
    num_tokens = asked.num_windows * asked.length
    operations = 20.0 * weights
    if recipe.uses_inputs:
        active = sum(group.share * group.width_out * group.width_in for group in groups)
        operations += _PASSES * 2 * active * num_tokens
        # Two products of the inputs with themselves, shared by the linears that read them.
        operations += sum(4.0 * group.share * num_tokens * group.width_in**2 for group in groups)
        operations += sum(4.0 * group.width_out * group.width_in**2 for group in groups)
        if "awq" in recipe.method:
            searches = 2 * 2 * NUM_RATIOS
            operations += sum(searches * group.width_out * group.width_in**2 for group in groups)
    rate = _operations_per_s(device)
    seconds = _FIXED_S + operations / rate
    if asked.text is None and asked.dataset is None:
        counts = asked.counts(calibrates=recipe.uses_inputs)
        num_written = counts.total * counts.length
        each = 2.0 * (weights + architecture.vocab_size * architecture.hidden_size)
        seconds += num_written * (each / (_WRITING_SHARE * rate) + _WRITTEN_TOKEN_S)
    return seconds


def _operations_per_s(device: torch.device) -> float:
    a = torch.ones(_PROBE, _PROBE, device=device)
    best = float("inf")
    for _ in range(4):
        started = time.perf_counter()
        float((a @ a)[0, 0])  # reading a value waits for the product
        best = min(best, time.perf_counter() - started)
    return float(2 * _PROBE**3 / best)
