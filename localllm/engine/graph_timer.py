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
        for _ in range(3):
            call()
        torch.cuda.synchronize()
        before, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:
            # It looks at a value, say; what fails in a capture leaves the device as it was.
            torch.cuda.set_stream(before)
            torch.cuda.synchronize()
            return call
        return graph.replay
