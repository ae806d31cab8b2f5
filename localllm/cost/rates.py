"""The limits that speed is compared with: the bytes a step must move, the operations it must do,
and this machine's rate for each, measured in the same run.

A decode step reads every weight once, whatever the batch, and every key and value of its requests;
a prefill does two operations per weight and token. (Williams et al. 2009, "Roofline".)
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F

from localllm.model.architecture import HEAD, Architecture
from localllm.model.blocks.block import RowBytes, Work, read_share
from localllm.operators.device import seconds_on_gpu
from localllm_kernels.compiling.traits import Arithmetic

# Larger than the caches of processors; on a GPU large enough to take most of a millisecond, so that
# the launch is negligible.
_STREAM_BYTES = {"cpu": 256 << 20, "cuda": 2 << 30}
# A measurement takes at most a quarter of a GPU's free memory, of which an engine may leave little.
_FREE_SHARE = 4
_MATRIX_WIDTH = {"cpu": 2048, "cuda": 8192}
# A product that takes this long at a small width is as slow at any: torch multiplies int8 one by
# one on processors without VNNI, for seconds at the full width.
_SMALL_WIDTH, _SLOW_S = 512, 0.005
_REPEATS = 3
# Each holds the values of those before it.
_FROM_NARROW: tuple[Arithmetic, ...] = ("int8", "bf16", "fp32")


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of this machine: bytes a second from memory, operations a second in a product. An
    arithmetic that torch has no product for on this device is left out.
    """

    memory_bytes_per_s: float
    operations_per_s: dict[Arithmetic, float]

    def peak(self, arithmetic: Arithmetic) -> float | None:
        """The best rate of a product that can do the work of `arithmetic`: its own, or a wider one,
        as the narrow ones are slow on processors without instructions for them. None if no such
        product is known.
        """
        wider = _FROM_NARROW[_FROM_NARROW.index(arithmetic) :]
        known = [self.operations_per_s[name] for name in wider if name in self.operations_per_s]
        return max(known, default=None)

    @classmethod
    def median(cls, several: Iterable["Rates"]) -> "Rates":
        """The median of several measurements, rate by rate."""
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
    """The best of a few runs of torch's fastest ways to read, copy and multiply."""
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
    rates = _product_rates_at(_SMALL_WIDTH, device)
    fast = {name for name, rate in rates.items() if 2.0 * _SMALL_WIDTH**3 / rate < _SLOW_S}
    return rates | _product_rates_at(_MATRIX_WIDTH[device.type], device, fast)


def _product_rates_at(
    width: int, device: torch.device, only: Collection[Arithmetic] = get_args(Arithmetic)
) -> dict[Arithmetic, float]:
    whole = torch.randn(width, width, device=device)
    half = whole.bfloat16()
    codes = torch.randint(-127, 127, (width, width), dtype=torch.int8, device=device)
    products: dict[Arithmetic, Callable[[], object]] = {
        "fp32": lambda: F.linear(whole, whole),
        "bf16": lambda: F.linear(half, half),
        # cuBLASLt has int8 products only for a column-major second matrix.
        "int8": lambda: torch._int_mm(codes, codes.t()),
    }
    found: dict[Arithmetic, float] = {}
    for name, product in products.items():
        if name not in only:
            continue
        with contextlib.suppress(RuntimeError):  # some GPUs lack some products
            found[name] = 2.0 * width**3 / best_time(product, device)
    return found


def _stream_bytes(device: torch.device) -> int:
    """Bytes to read for a measurement, a multiple of a row."""
    wanted = _STREAM_BYTES[device.type]
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        wanted = min(wanted, max(256 << 20, free // _FREE_SHARE))
    return wanted // (4 * 8192) * (4 * 8192)


def best_time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of a few calls, after one that warms up."""
    return min(timed(call, device) for _ in range(_REPEATS + 1))


def timed(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call with its work on the device; on a GPU measured by the device's clock."""
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

    `stored`: the bytes of the linears and the head as they are stored, by the part of the rows that
    compute them; `num_weights`: how many weights compute a row, without the head.
    """

    architecture: Architecture
    stored: Mapping[float, int]
    num_weights: int
    row_bytes: RowBytes

    @classmethod
    def of(
        cls, architecture: Architecture, linear_bytes: Callable[[str], int], row_bytes: RowBytes
    ) -> "ModelWork":
        """Count; `linear_bytes` gives the bytes of a linear by name, also for `lm_head`."""
        shapes = architecture.linears()
        shapes.pop(HEAD, None)
        shares, stored, num_weights = architecture.shares(), {1.0: linear_bytes(HEAD)}, 0.0
        for name, (width_out, width_in) in shapes.items():
            share = shares.get(name, 1.0)
            stored[share] = stored.get(share, 0) + linear_bytes(name)
            num_weights += share * width_out * width_in
        return cls(architecture, stored, round(num_weights), row_bytes)

    def weight_bytes(self, num_rows: int) -> int:
        """Bytes of weights that `num_rows` rows read; experts are as likely as each other."""
        return round(sum(read_share(share, num_rows) * size for share, size in self.stored.items()))

    def decode_bytes(self, contexts: Iterable[int]) -> int:
        """Bytes that a decode step reads, of requests with these context lengths."""
        contexts = list(contexts)
        return self.weight_bytes(len(contexts)) + self._beside(contexts).state_bytes

    def decode_operations(self, contexts: Iterable[int]) -> int:
        """Operations of such a step; a multiply-add counts as two."""
        contexts = list(contexts)
        weights = self.num_weights + self._head_weights
        return 2 * weights * len(contexts) + self._beside(contexts).operations

    def prefill_operations(self, num_tokens: int, depth: int = 0) -> int:
        """Operations for `num_tokens` tokens after `depth`; the head computes only the last."""
        beside = self._beside(range(depth + 1, depth + num_tokens + 1))
        return 2 * self.num_weights * num_tokens + beside.operations + 2 * self._head_weights

    @property
    def _head_weights(self) -> int:
        return self.architecture.vocab_size * self.architecture.hidden_size

    def _beside(self, contexts: Iterable[int]) -> Work:
        """The cost of each context's newest token in all layers, apart from the linears."""
        state_bytes = operations = 0
        blocks = self.architecture.blocks()
        for context in contexts:
            for block, count in blocks.items():
                work = block.work(context, self.row_bytes)
                state_bytes += count * work.state_bytes
                operations += count * work.operations
        return Work(state_bytes, operations)


@dataclass(frozen=True, slots=True)
class Roofline:
    """The least time that some work can take on this machine, and what limits it."""

    seconds: float
    bound: Literal["memory", "arithmetic"]

    @classmethod
    def of(
        cls, num_bytes: int, operations: int, limits: Rates, arithmetic: Arithmetic
    ) -> "Roofline":
        """The slower of bytes and operations; memory alone if `arithmetic` has no rate."""
        moving = num_bytes / limits.memory_bytes_per_s
        rate = limits.peak(arithmetic)
        computing = 0.0 if rate is None else operations / rate
        return cls(moving, "memory") if moving >= computing else cls(computing, "arithmetic")

    def verdict(self, seconds: float) -> str:
        """`seconds` compared with the limit, in words."""
        share = f"{self.seconds / seconds:.0%}"
        if self.bound == "memory" and seconds < self.seconds:
            return "faster than memory bandwidth: fed by the caches"
        if self.bound == "memory":
            return f"{share} of the memory bandwidth"
        if seconds < self.seconds:
            return f"{self.seconds / seconds:.2f} times as fast as torch's best product here"
        return f"{share} of the arithmetic peak"
