"""Times calls on a GPU as a step makes them: captured, and with operands that come from memory."""

from collections.abc import Callable

import torch

from localllm.engine.device import seconds_on_gpu

# Seconds of a call.
Timer = Callable[[Callable[[], object]], float]
# More than the second cache of any GPU there is.
_FLUSHED_BYTES = 512 << 20


class GraphTimer:
    """Each call is captured once, and what is in the second cache overwritten before each replay.

    A call that cannot be captured is timed as it is launched.
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
        """Free what the captured calls hold."""
        self._replays.clear()
        torch.cuda.empty_cache()

    def _captured(self, call: Callable[[], object]) -> Callable[[], object]:
        for _ in range(2):
            call()
        torch.cuda.synchronize()
        # A capture that fails may leave torch's allocator waiting for its end for ever.
        if _waits_for_values(call):
            return call
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


def _waits_for_values(call: Callable[[], object]) -> bool:
    """Whether Python looks at what the device computes in it."""
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
