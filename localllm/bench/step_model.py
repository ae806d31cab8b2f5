"""How long a decode step should take on a GPU: what its kernels move and compute, and launches.

A prediction, for where there is no such GPU: every kernel takes what memory traffic or arithmetic
takes at a share of the GPU's own rates, and every launch in a graph a fixed time more.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from localllm.bench.limits import ModelWork
from localllm.model.architectures import linear_shapes
from localllm.model.layers import DOWN, GATE_UP, OUTPUT, QKV

_PRODUCTS = {"qkv": QKV, "output": OUTPUT, "gate and up": GATE_UP, "down": DOWN}
# Kernels of a layer beside products and attention: rotation; and where products take nothing else
# in, two norms and the gate.
_FUSED, _APART = 1, 4
# Of a step: ids, embedding, cosines, sines, last norm, head to float32, sampling, block tables.
_ONCE = 8


@dataclass(frozen=True, slots=True)
class Gpu:
    """What a GPU does at its best: bytes a second in a copy, operations a second in bfloat16."""

    name: str
    copy_bytes_per_s: float
    operations_per_s: float


@dataclass(frozen=True, slots=True)
class Care:
    """How near to that kernels come, and the seconds that one costs beside its work.

    1.3 µs a kernel within a graph: Hazy Research 2025, "Look Ma, No Bubbles".
    """

    plain: float
    quantized: float
    attention: float
    launch_s: float


AT_THE_LIMIT = Care(1.0, 1.0, 1.0, 1.3e-6)
WITH_CARE = Care(0.9, 0.67, 0.85, 2.0e-6)


@dataclass(frozen=True, slots=True)
class Step:
    """Seconds of each kind of kernel in all layers, the number of launches, and their seconds."""

    kernels: Mapping[str, float]
    launches: int
    launches_s: float

    @property
    def seconds(self) -> float:
        """Of the whole step."""
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
) -> Step:
    """A decode step of `batch` requests with `context` tokens each.

    `linear_bytes`: of a linear as it is stored, `lm_head` among them; `is_fused`: whether norms,
    gate and residual are computed within the products, as those with 4-bit weights do.
    """
    config, shapes = work.config, linear_shapes(work.config, work.spec)

    def product(names: list[str], num_weights: int) -> float:
        stored = sum(map(linear_bytes, names))
        share = care.plain if stored == 2 * num_weights else care.quantized
        moving = stored / (gpu.copy_bytes_per_s * share)
        return max(moving, 2 * num_weights * batch / (gpu.operations_per_s * share))

    kernels = dict.fromkeys((*_PRODUCTS, "attention", "head"), 0.0)
    for layer in range(config.num_layers):
        for kind, parts in _PRODUCTS.items():
            names = [f"model.layers.{layer}.{part}" for part in parts]
            kernels[kind] += product(names, sum(a * b for a, b in map(shapes.__getitem__, names)))
    kernels["head"] = product(["lm_head"], config.vocab_size * config.hidden_size)
    contexts = [context] * batch
    kv_bytes = work.decode_bytes(contexts) - work.weight_bytes
    kernels["attention"] = kv_bytes / (gpu.copy_bytes_per_s * care.attention)
    a_layer = len(_PRODUCTS) + 1 + (_FUSED if is_fused else _APART)
    launches = config.num_layers * a_layer + 1 + _ONCE
    return Step(kernels, launches, launches * care.launch_s)
