"""Times GPU calls as they run in a step: captured in a graph, with operands read from memory."""

from collections.abc import Callable

import torch

from localllm.operators.device import seconds_on_gpu

# Returns the seconds that a call takes.
Timer = Callable[[Callable[[], object]], float]
# Larger than the L2 cache of any GPU.
_FLUSHED_BYTES = 512 << 20


class GraphTimer:
    """Captures each call once, and overwrites the L2 cache before each replay.

    A call that cannot be captured is launched kernel by kernel and timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device=device)
        self._replays: dict[Callable[[], object], Callable[[], object]] = {}

    def __call__(self, call: Callable[[], object]) -> float:
        """Seconds of `call`."""
        if call not in self._replays:
            self._replays[call] = self._captured(call)
        self._flushed.zero_()
        return seconds_on_gpu(self._replays[call])

    def forget(self) -> None:
        """Free the memory that captured calls hold."""
        self._replays.clear()
        torch.cuda.empty_cache()

    def _captured(self, call: Callable[[], object]) -> Callable[[], object]:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        # After a failed capture, torch's allocator may wait forever for its end.
        if _waits_for_values(call):
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def _waits_for_values(call: Callable[[], object]) -> bool:
    """Whether the call makes Python wait for values from the device."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode(before)
    return False
