"""Estimates of the size of the result and of the time to make it, before anything is done."""

import time
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from localllm.model.architecture import Architecture
from localllm.quantize.awq import NUM_OUTPUTS, NUM_RATIOS
from localllm.quantize.calibrate import CalibrationRequest
from localllm.quantize.proof import LEAST_ROUNDS, SPEED_S, SPEED_TOKENS
from localllm.quantize.recipe import Recipe
from localllm.quantize.run import QuantizeRequest, float32_ops
from localllm.quantize.source import Ends, find_architecture, open_unquantized, result_bytes

_PROBE, _PROBE_S = 1024, 0.15
# The share of a large product's rate that generating text reaches, in a batch of some tens; and the
# seconds per token that Python, attention and sampling add. Measured on two cores, 2026-11.
_WRITING_SHARE, _WRITTEN_TOKEN_S = 0.63, 4.8e-4
# Loading a model, and reading and writing one layer. Measured on two cores, 2026-11.
_LOAD_S, _LAYER_S = 2.0, 0.03
# The share of that rate that the products of a layer reach, and the seconds per weight that fitting
# grids and rounding columns add. Measured on two cores, 2026-11.
_LAYER_SHARE, _ROUNDED_S = 0.85, 2.5e-7
# Bytes a second of a decoding step: assumed, of a slow machine's memory.
_DECODE_BYTES_PER_S = 10e9


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations a second of a large product, in float32 and with factors in bfloat16."""

    exact: float
    rounded: float

    @classmethod
    def measured(cls, device: torch.device) -> "Rates":
        """On this machine, in a fraction of a second."""
        a = torch.ones(_PROBE, _PROBE, device=device)
        exact, linears = _operations_per_s(lambda: a @ a), float32_ops(device).linears
        if linears is None:
            return cls(exact, exact)
        product = linears.plain(a.bfloat16(), None)
        return cls(exact, _operations_per_s(lambda: product(a)))


@dataclass(frozen=True, slots=True)
class StageSeconds:
    """About how long each stage of a quantization takes, by the names that its progress has."""

    text: float
    layers: float
    head: float
    measuring: float

    @property
    def total(self) -> float:
        """All stages."""
        return sum(self.named().values())

    def named(self) -> dict[str, float]:
        """Seconds by the name of the stage."""
        names = ("calibration text", "layers", "head", "measuring")
        return dict(zip(names, astuple(self), strict=True))


@dataclass(frozen=True, slots=True)
class Estimate:
    """Bytes of the weights, the embedding and the head, and about how long it takes here."""

    source_bytes: int
    result_bytes: int
    ends: Ends
    seconds: float


def estimate(request: QuantizeRequest) -> Estimate:
    """The sizes of source and result, and the time it takes. Raises: as `open_unquantized`."""
    _, source = open_unquantized(request.model, request.recipe)
    num_bytes = sum(info.num_bytes for info in source.weights.plain.values())
    result = result_bytes(source, request.recipe)
    ends = Ends.of(source, request.recipe)
    return Estimate(num_bytes, result, ends, expect_stages(request).total)


def expect_stages(request: QuantizeRequest) -> StageSeconds:
    """See `stage_seconds`; the weights may still have to be fetched."""
    return stage_seconds(
        find_architecture(request.model),
        request.recipe,
        request.calibration,
        Rates.measured(request.device),
        verify=request.verify,
    )


def stage_seconds(
    architecture: Architecture,
    recipe: Recipe,
    asked: CalibrationRequest,
    rates: Rates,
    *,
    verify: bool,
) -> StageSeconds:
    """Seconds of each stage, from the number of operations.

    Includes the calibration text that a model generates, but no download.
    """
    calibrates = recipe.uses_inputs
    counts = asked.counts(calibrates=calibrates)
    num_tokens = counts.calibrating * counts.length
    layers = _layer_operations(architecture, recipe, num_tokens) / rates.exact
    layers += _LAYER_S * architecture.num_layers
    if calibrates:
        passed = _passing_operations(architecture, recipe, num_tokens) / rates.rounded
        layers = (layers + passed) / _LAYER_SHARE + _ROUNDED_S * _num_weights(architecture)
    num_ends = architecture.vocab_size * architecture.hidden_size
    weights = _num_weights(architecture) + num_ends
    head = text = measuring = 0.0
    if recipe.head == "int4":
        # The errors of grids, and GPTQ; as a layer's linear without its moments.
        width = 8 if recipe.feeds_back else 4
        head = width * num_ends * architecture.hidden_size / rates.exact + _ROUNDED_S * num_ends
    if (calibrates or verify) and asked.is_written:
        each = 2.0 * weights / (_WRITING_SHARE * rates.rounded) + _WRITTEN_TOKEN_S
        text = _LOAD_S + counts.total * counts.length * each
    if verify:
        compared = 2 * 2.0 * weights * counts.held_back * counts.length / rates.exact
        decoded = 2 * LEAST_ROUNDS * SPEED_TOKENS * 2 * weights / _DECODE_BYTES_PER_S
        measuring = compared + 2 * _LAYER_S * architecture.num_layers
        measuring += 2 * _LOAD_S + max(SPEED_S, decoded)
    return StageSeconds(text, layers, head, measuring)


def _num_weights(architecture: Architecture) -> int:
    return sum(group.width_out * group.width_in for _, group in architecture.groups())


def _passing_operations(architecture: Architecture, recipe: Recipe, num_tokens: int) -> float:
    """Operations of passing tokens through all layers."""
    groups = [group for _, group in architecture.groups()]
    active = sum(group.share * group.width_out * group.width_in for group in groups)
    # Both models pass through a layer; once more where awq has changed what was passed.
    return 2.0 * (3 if "awq" in recipe.method else 2) * active * num_tokens


def _layer_operations(architecture: Architecture, recipe: Recipe, num_tokens: int) -> float:
    """Operations of rounding all layers, with the moments of `num_tokens` inputs."""
    groups = [group for _, group in architecture.groups()]
    operations = 20.0 * _num_weights(architecture)
    if not recipe.uses_inputs:
        return operations
    # The moments of the inputs, see Moments; shared by the linears that read them.
    for group in groups:
        width = 1.125 * group.width_in
        if recipe.feeds_back:
            width += min(2.0 * group.width_in, 4.0 * group.width_out)
        operations += group.share * num_tokens * group.width_in * width
    has_awq, has_gptq = "awq" in recipe.method, recipe.feeds_back
    for group in groups:
        width = 4.0 * group.width_out  # the error of the result
        if has_gptq:  # the inverse of the moments, again of scaled ones, and its product
            width += 4.0 * group.width_out + (1 + has_awq) * group.width_in
        if has_awq:
            width += 4.0 * NUM_RATIOS * min(NUM_OUTPUTS, group.width_out)
        operations += group.width_in**2 * width
    return operations


def _operations_per_s(multiply: Callable[[], Tensor]) -> float:
    best, began = float("inf"), time.perf_counter()
    # Beside other programs many tries are slow, and the quickest counts.
    while best == float("inf") or time.perf_counter() - began < _PROBE_S:
        started = time.perf_counter()
        float(multiply()[0, 0])  # reading a value waits for the product
        best = min(best, time.perf_counter() - started)
    return float(2 * _PROBE**3 / best)
