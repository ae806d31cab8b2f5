"""What a GPU does beside Python, and how it fails.

Everything that a runner starts there runs in the order in which it was started.
"""

import logging
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from localllm_kernels.driver import DriverError, start_driver

logger = logging.getLogger(__name__)

# Words of errors that torch has no type for.
_OUT_OF_MEMORY = (
    "CUDA out of memory",
    "CUDA error: out of memory",
    "[CUDA]: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    # For want of memory for its workspace; `prepare` has it made while there is some.
    "CUBLAS_STATUS_NOT_INITIALIZED",
    "can't allocate memory",
)
_FATAL = ("CUDA error", "Triton Error [CUDA]", "HIP error")

_Result = TypeVar("_Result")


class CaptureError(Exception):
    """Something could not be captured; the device goes on."""


class Device(Protocol):
    """Copies and captures on one stream."""

    def host_buffer(self, num_bytes: int) -> Tensor:
        """uint8 [num_bytes] in host memory from which the device can copy by itself."""

    def upload(self, target: Tensor, source: Tensor) -> None:
        """Copy from a host buffer, which must stay as it is until the device has come so far."""

    def download(self, target: Tensor, source: Tensor) -> None:
        """Copy to a host buffer, where it is once the device has come so far."""

    def mark(self) -> Callable[[], None]:
        """What waits until all that was started so far is done."""

    def capture(self, call: Callable[[], _Result]) -> tuple[Callable[[], None], _Result]:
        """Record what `call` does, without doing it: what does it again, and where the
        tensors of its result will be. Its operands stay where they are, and so do their shapes.

        Raises: CaptureError.
        """

    def time(self, call: Callable[[], None]) -> float:
        """Seconds that what `call` starts takes there."""

    def release_memory(self) -> None:
        """Give back what the allocator holds without need."""


class CudaDevice:
    """An NVIDIA or AMD GPU."""

    def __init__(self) -> None:
        # Graphs take turns in one memory: none of them runs beside another, and what they leave
        # for later steps lies outside.
        self._pool = torch.cuda.graph_pool_handle()

    def host_buffer(self, num_bytes: int) -> Tensor:
        """See Device."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def upload(self, target: Tensor, source: Tensor) -> None:
        """See Device."""
        target.copy_(source, non_blocking=True)

    def download(self, target: Tensor, source: Tensor) -> None:
        """See Device."""
        target.copy_(source, non_blocking=True)

    def mark(self) -> Callable[[], None]:
        """See Device."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event.synchronize

    def capture(self, call: Callable[[], _Result]) -> tuple[Callable[[], None], _Result]:
        """See Device."""
        # Made once a thread, and not while something is captured.
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]
        before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            # Another thread may use the device meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = call()
        except RuntimeError as error:
            # What fails in a capture reads like what ends a device; that shows here.
            torch.cuda.set_stream(before)
            torch.cuda.synchronize()
            raise CaptureError(str(error)) from error
        return graph.replay, result

    def time(self, call: Callable[[], None]) -> float:
        """See Device."""
        return seconds_on_gpu(call)

    def release_memory(self) -> None:
        """See Device."""
        self._pool = torch.cuda.graph_pool_handle()  # the graphs of the old one are gone
        try:
            torch.cuda.empty_cache()
        except RuntimeError as error:  # after a capture that failed, the allocator may refuse
            logger.warning("memory is not given back: %s", error)


def seconds_on_gpu(call: Callable[[], object]) -> float:
    """What the work that `call` starts takes, by the GPU's own clock."""
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
    """Have what libraries keep on a GPU made before its memory is counted and divided."""
    if device.type == "cuda":
        torch.cuda.current_blas_handle()  # type: ignore[no-untyped-call]


def why_no_kernels() -> str | None:
    """Why Triton's kernels cannot be launched on the GPU here, and what would help; None where they
    can.
    """
    try:
        start_driver()
    except DriverError as error:
        return str(error)
    return None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, after which everything else goes on."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(part in str(error) for part in _OUT_OF_MEMORY)


def is_fatal(error: BaseException) -> bool:
    """Whether the device is lost to this process: an illegal access, a failed assertion."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return isinstance(error, torch.AcceleratorError) or str(error).startswith(_FATAL)
