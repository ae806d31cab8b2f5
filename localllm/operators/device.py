"""A GPU that works asynchronously to Python, and the ways in which it fails.

Everything that a runner starts on it runs in the order in which it was started.
"""

import logging
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

# Texts of errors for which torch has no type.
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # No memory was left for cuBLAS's workspace; `prepare` creates it while there is some.
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "can't allocate memory",
)
_FATAL = ("CUDA error", "Triton Error [CUDA]", "HIP error")

_Result = TypeVar("_Result")


class CaptureError(Exception):
    """A call could not be captured; the device is still usable."""


class Device:
    """An NVIDIA or AMD GPU: copies and graph captures on one stream."""

    def __init__(self) -> None:
        # Graphs share one memory pool: no two of them run at the same time, and what they leave
        # for later steps lies outside it.
        self._pool = torch.cuda.graph_pool_handle()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] in host memory that the device can copy from asynchronously."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy from a host buffer, which must not change until the device has done the copy."""
        target.copy_(source, non_blocking=True)

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copy to a host buffer, which is valid once the device has done the copy."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """A function that waits until all work started so far is done."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def capture(self, call: Callable[[], _Result]) -> tuple[Callable[[], None], _Result]:
        """Record the work of `call` without running it; returns a function that replays it, and
        the tensors that will hold its result. Addresses and shapes of its operands are fixed.

        Raises: CaptureError.
        """
        # Created once per thread, which must not happen during a capture.
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            # Another thread may use the device during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = call()
        except RuntimeError as error:
            # A failed capture reads like a lost device; if the device is lost, this raises.
            torch.cuda.set_stream(before)
            torch.cuda.synchronize()
            raise CaptureError(str(error)) from error
        return graph.replay, result

    def time(self, call: Callable[[], None]) -> float:
        """Seconds that the work started by `call` takes on the device."""
        return seconds_on_gpu(call)

    def release_memory(self) -> None:
        """Release memory that the allocator holds but does not use."""
        self._pool = torch.cuda.graph_pool_handle()  # the graphs of the old pool are gone
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # after a capture that failed, the allocator may refuse
            logger.warning("memory could not be released: %s", error)


def seconds_on_gpu(call: Callable[[], object]) -> float:
    """Seconds that the work started by `call` takes, by the GPU's own clock."""
    start, end = (
        torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        for _ in range(2)
    )
    start.record()
    call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3


def prepare(device: torch.device) -> None:
    """Create what libraries keep on a GPU before its memory is measured and divided."""
    if device.type == "cuda":
        torch.empty(1, device=device)  # the context: torch warns if cuBLAS has to create it
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; the device stays usable."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _OUT_OF_MEMORY)


def is_fatal(error: BaseException) -> bool:
    """Whether the device is lost to this process, as after an illegal access."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or str(error).startswith(_FATAL)
