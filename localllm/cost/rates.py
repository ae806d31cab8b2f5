"""The limits that speed is held against: bytes a step must move, operations it must do, and the
rates at which this machine does either, measured in the same run.

A decode step reads every weight once, whatever the batch, and every key and value of its requests;
a prefill does two operations a weight and token. (Williams et al. 2009, "Roofline".)
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from localllm.engine.device import seconds_on_gpu
from localllm.model.architectures import ArchSpec, layer_windows, linear_shapes
from localllm.model.config import ModelConfig

# Larger than the caches of processors; on a GPU as much as takes most of a millisecond, beside
# which a launch is nothing.
_STREAM_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
# Of a GPU's free memory, which an engine may have taken most of.
_FREE_SHARE = 4
_MATRIX_WIDTH = {"cpu": 2048, "cuda": 8192}
_REPEATS = 3

Arithmetic = Literal["fp32", "bf16", "int8"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of this machine: bytes a second from memory, operations a second in a product; an
    arithmetic that torch has no product for here is left out.
    """

    memory_bytes_per_s: float
    operations_per_s: dict[Arithmetic, float]

    @classmethod
    def median(cls, several: Iterable["Rates"]) -> "Rates":
        """The middle of several measurements, rate by rate."""
        found = list(several)
        return cls(
            statistics.median(each.memory_bytes_per_s for each in found),
            {
                name: statistics.median(each.operations_per_s[name] for each in found)
                for name in found[0].operations_per_s
                if all(name in each.operations_per_s for each in found)
            },
        )


def measure_rates(device: torch.device) -> Rates:
    """The best of a few runs of what reads, copies and multiplies fastest in torch."""
    return Rates(_memory_rate(device), _product_rates(device))


def _memory_rate(device: torch.device) -> float:
    num_bytes = _stream_bytes(device)
    x = torch.ones(num_bytes // 4, device=device)
    y = torch.empty_like(x)
    rows = x.view(-1, 8192)
    vector = torch.ones(8192, device=device)
    return max(
        num_bytes / best_time(lambda: x.sum(), device),
        num_bytes / best_time(lambda: rows @ vector, device),
        2 * num_bytes / best_time(lambda: y.copy_(x), device),
    )


def _product_rates(device: torch.device) -> dict[Arithmetic, float]:
    width = _MATRIX_WIDTH[device.type]
    whole = torch.randn(width, width, device=device)
    half = whole.bfloat16()
    codes = torch.randint(-127, 127, (width, width), dtype=torch.int8, device=device)
    products: dict[Arithmetic, Callable[[], object]] = {
        "fp32": lambda: F.linear(whole, whole),
        "bf16": lambda: F.linear(half, half),
        # cuBLASLt has int8 products for a second matrix in columns only.
        "int8": lambda: torch._int_mm(codes, codes.t()),
    }
    found: dict[Arithmetic, float] = {}
    for name, product in products.items():
        with contextlib.suppress(RuntimeError):  # nor for every GPU
            found[name] = 2.0 * width**3 / best_time(product, device)
    return found


def _stream_bytes(device: torch.device) -> int:
    """Bytes to read for a measurement, a multiple of a row's."""
    wanted = _STREAM_BYTES[device.type]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        wanted = min(wanted, max(256 << 20, free // _FREE_SHARE))
    return wanted // (4 * 8192) * (4 * 8192)


def best_time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few calls, after one that warms up."""
    return min(timed(call, device) for _ in range(_REPEATS + 1))


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, with what it started on the device; on a GPU by the device's clock."""
    synchronize(device)
    if device.type == "cuda":
        return seconds_on_gpu(call)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True, slots=True)
class ModelWork:
    """What a forward pass of a model has to move and to compute.

    `weight_bytes`: of the linears with the head, as they are stored; `num_weights`: their values,
    the head not counted; `kv_row_bytes`: of a head's key (or value) of a token.
    """

    config: ModelConfig
    spec: ArchSpec
    weight_bytes: int
    num_weights: int
    kv_row_bytes: int

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        spec: ArchSpec,
        linear_bytes: Callable[[str], int],
        kv_row_bytes: int,
    ) -> "ModelWork":
        """Count; `linear_bytes` tells the bytes of a linear by its name, `lm_head` among them."""
        shapes = {
            name: shape for name, shape in linear_shapes(config, spec).items() if name != "lm_head"
        }
        return cls(
            config,
            spec,
            weight_bytes=sum(map(linear_bytes, [*shapes, "lm_head"])),
            num_weights=sum(width_out * width_in for width_out, width_in in shapes.values()),
            kv_row_bytes=kv_row_bytes,
        )

    def decode_bytes(self, contexts: Iterable[int]) -> int:
        """Bytes that one decode step reads for requests with so many tokens each, the newest
        included.
        """
        config = self.config
        token_bytes = 2 * config.num_kv_heads * self.kv_row_bytes
        return self.weight_bytes + token_bytes * self._seen(contexts)

    def decode_operations(self, contexts: Iterable[int]) -> int:
        """Operations of such a step, a product and a sum counting as two."""
        config, contexts = self.config, list(contexts)
        weights = self.num_weights + config.vocab_size * config.hidden_size
        attention = 4 * config.num_heads * config.head_dim * self._seen(contexts)
        return 2 * weights * len(contexts) + attention

    def prefill_operations(self, num_tokens: int, depth: int = 0) -> int:
        """Operations for `num_tokens` tokens of one request behind `depth` others; the head
        computes the last token only.
        """
        config = self.config
        pairs = self._seen(range(depth + 1, depth + num_tokens + 1))
        attention = 4 * config.num_heads * config.head_dim * pairs
        head = 2 * config.vocab_size * config.hidden_size
        return 2 * self.num_weights * num_tokens + attention + head

    def _seen(self, contexts: Iterable[int]) -> int:
        """Tokens that the newest ones of such contexts look at, over all layers."""
        windows = layer_windows(self.config, self.spec)
        return sum(
            context if window is None else min(window, context)
            for context in contexts
            for window in windows
        )


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time that some work takes here, and what it waits for."""

    seconds: float
    bound: Literal["memory", "arithmetic"]

    @classmethod
    def of(
        cls, num_bytes: int, operations: int, limits: Rates, arithmetic: Arithmetic
    ) -> "Roofline":
        """Bytes and operations overlap, so the slower of the two; memory alone where the rate of
        `arithmetic` is not known.
        """
        moving = num_bytes / limits.memory_bytes_per_s
        rate = limits.operations_per_s.get(arithmetic)
        computing = 0.0 if rate is None else operations / rate
        return cls(moving, "memory") if moving >= computing else cls(computing, "arithmetic")

    def verdict(self, seconds: float) -> str:
        """`seconds` as a share of it, in words."""
        share = f"{self.seconds / seconds:.0%}"
        if self.bound == "memory" and seconds < self.seconds:
            return "fed by the caches, sooner than memory could"
        if self.bound == "memory":
            return f"{share} of what this memory can feed"
        if seconds < self.seconds:
            return f"{self.seconds / seconds:.2f} times as fast as torch's best product here"
        return f"{share} of what this machine can multiply"
