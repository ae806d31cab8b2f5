"""Memory that shows what a kernel reads or writes where it must not.

Everything that is allocated within `GuardedMemory` is poisoned and stands between guards; whatever
a test hands in through `guarded` stands between guards too. A read past an end brings NaN (or the
greatest number) into the result, a write there changes a guard.
"""

from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

GUARD = 64  # values on each side
needs_interpreter = pytest.mark.skipif(
    not triton.knobs.runtime.interpret,
    reason="kernels are compiled here, see tests/gpu; interpreted with TRITON_INTERPRET=1",
)
# Of models on a device that captures: torch's operators as launches (launched_operators.py), and in
# the slow suite the kernels, interpreted.
CAPTURING = [
    "launched",
    pytest.param("triton", marks=[pytest.mark.slow, needs_interpreter]),
]
_ALLOCATIONS = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.empty_like.default,
}


def _poison(dtype: torch.dtype) -> Any:
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).max


class GuardedMemory(TorchDispatchMode):
    """A context; `check` says after it whether all guards stand."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _ALLOCATIONS or not result.is_contiguous():
            return result
        return self.place(result, _poison(result.dtype))

    def place(self, like: Tensor, value: Any) -> Tensor:
        """A tensor of the shape of `like` between guards, filled with `value`."""
        count = like.numel()
        bits = torch.int8 if like.dtype.itemsize == 1 else like.dtype
        buffer = torch.full((count + 2 * GUARD,), _poison(bits), dtype=bits, device=like.device)
        buffer = buffer.view(like.dtype)
        self._buffers.append((buffer, count))
        inner = buffer[GUARD : GUARD + count].view(like.shape)
        if like.dtype.itemsize > 1:
            inner.fill_(value)
        return inner

    def guarded(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` between guards."""
        inner = self.place(tensor, 0)
        inner.view(torch.uint8).copy_(tensor.contiguous().view(torch.uint8))
        return inner

    def check(self) -> None:
        """Raises AssertionError where a guard was written to."""
        for buffer, count in self._buffers:
            bits = buffer.view(torch.int8) if buffer.dtype.itemsize == 1 else buffer
            for guard in (bits[:GUARD], bits[GUARD + count :]):
                expected = torch.full_like(guard, _poison(guard.dtype))
                torch.testing.assert_close(guard, expected, equal_nan=True, rtol=0, atol=0)
