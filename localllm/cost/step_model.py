"""How long a decode step should take on a GPU: what its kernels move and compute, and launches.

A prediction, for a GPU that is not at hand: every kernel takes the time of its memory traffic or
arithmetic, at a share of the GPU's rates, and every launch in a graph adds a fixed time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from localllm.cost.rates import ModelWork
from localllm.model.architecture import HEAD
from localllm.model.blocks.block import read_share

# Launches once a step: ids, embedding, cosines, sines, last norm, head to float32, sampling, block
# tables.
_ONCE = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU's peak rates: bytes a second in a copy, operations a second in bfloat16, and
    instructions a second, counted for each thread of a warp.
    """

    name: str
    copy_bytes_per_s: float
    operations_per_s: float
    issue_per_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Care:
    """The shares of those rates that kernels reach, and the seconds a launch costs.

    `quantized` is for products whose instructions have not been counted; other products reach
    `plain` of memory and arithmetic, and `issue` of the instruction rate.

    1.3 µs a kernel within a graph: Hazy Research 2025, "Look Ma, No Bubbles".
    """

    plain: float
    quantized: float
    attention: float
    launch_s: float
    issue: float = 1.0


AT_THE_LIMIT = Care(1.0, 1.0, 1.0, 1.3e-6)
WITH_CARE = Care(0.9, 0.67, 0.85, 2.0e-6, issue=0.75)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of each kind of kernel in all layers, the number of launches, and their seconds."""

    kernels: Mapping[str, float]
    launches: int
    launches_s: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.kernels.values()) + self.launches_s


def predict_decode(
    work: ModelWork,
    linear_bytes: Callable[[str], int],
    gpu: Gpu,
    care: Care,
    *,
    is_fused: bool,
    batch: int,
    context: int,
    instructions: Mapping[str, float] | None = None,
) -> Step:
    """Predict a decode step of `batch` requests with `context` tokens each.

    `linear_bytes`: stored bytes of a linear by name, also for `lm_head`; `is_fused`: whether the
    products compute norms, gate and residual too, as those with 4-bit weights do; `instructions`:
    per weight of a product, if they were counted (`localllm_kernels.compiling.machine_code`).
    """
    architecture, counted = work.architecture, instructions or {}

    def product(names: list[str], num_weights: int, kind: str) -> float:
        stored = sum(map(linear_bytes, names))
        is_plain = stored == 2 * num_weights or kind in counted
        share = care.plain if is_plain else care.quantized
        return max(
            stored / (gpu.copy_bytes_per_s * share),
            2 * num_weights * batch / (gpu.operations_per_s * share),
            counted.get(kind, 0.0) * num_weights / (gpu.issue_per_s * care.issue),
        )

    kernels: dict[str, float] = {}
    launches = 1 + _ONCE
    for layer, group in architecture.groups():
        names = [f"{layer}.{name}" for name in group.names]
        seconds = product(names, group.width_out * group.width_in, group.kind)
        seconds *= read_share(group.share, batch)
        kernels[group.kind] = kernels.get(group.kind, 0.0) + seconds
        # All experts are one product.
        launches += group.copy == 0
    for block, count in architecture.blocks().items():
        # Without fusion, each block has a separate norm before it.
        launches += count * (block.launches(is_fused=is_fused) + (0 if is_fused else 1))
    kv_bytes = work.decode_bytes([context] * batch) - work.weight_bytes(batch)
    kernels["attention"] = kv_bytes / (gpu.copy_bytes_per_s * care.attention)
    kernels["head"] = product([HEAD], architecture.vocab_size * architecture.hidden_size, "head")
    return Step(kernels, launches, launches * care.launch_s)
