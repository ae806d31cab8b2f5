"""A device that is none: it captures steps as a GPU would, and is stricter about what it is given.

A capture notes every operator and every launch with its operands, by address; a replay does them
again with what then lies there. Memory from outside is not kept alive for it, so a step that reads
what has been given up fails; a result is lost when another graph is replayed; a launch that is
captured is not executed; a value that Python looks at in a capture is an error.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from triton.runtime.interpreter import GridExecutor

from localllm.operators.device import CaptureError

_LOOKS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default}


_ARRIVED = (torch.empty(0), torch.empty(0))

_Result = TypeVar("_Result")


class _Outside:
    """A tensor by its address, which does not keep its memory alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._weak = tensor.untyped_storage()._weak_ref()
        self._view = (tensor.storage_offset(), tensor.size(), tensor.stride())
        self._dtype = tensor.dtype

    def tensor(self) -> Tensor:
        storage = torch.UntypedStorage._new_with_weak_ptr(self._weak)
        assert storage is not None, "a captured step reads memory that has been given up"
        return torch.empty(0, dtype=self._dtype).set_(storage, *self._view)


class Launch:
    """A function of torch's as a kernel that writes its result into memory it is given; `fn` may
    look at values, since a capture notes a launch without executing it.
    """

    def __init__(self, fn: Callable[..., Tensor]) -> None:
        self.fn = fn

    def __call__(self, out: Tensor, *args: Any, **kwargs: Any) -> None:
        out.copy_(self.fn(*args, **kwargs))


class Recording(TorchDispatchMode):
    """What is done within it, to be done again."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Callable[..., Any], Any, Any, Any]] = []
        self._own: set[int] = set()
        self._kept: list[Any] = []
        self.settings: list[dict[str, Any]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _LOOKS:
            raise CaptureError(f"{func} waits for a value")
        result = func(*args, **(kwargs or {}))
        self._note(func, args, kwargs or {}, result)
        return result

    def launch(self, executor: GridExecutor | Launch, args: Any, kwargs: Any) -> None:
        self.settings.append(kwargs)
        self._note(executor, args, kwargs, None)

    def replay(self) -> None:
        for func, args, kwargs, result in self._calls:
            new = func(*_mapped(_inside, args), **_mapped(_inside, kwargs))
            for old, value in zip(tree_leaves(result), tree_leaves(new), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != value.data_ptr():
                    old.copy_(value)

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        self._calls.append(
            (func, _mapped(self._address, args), _mapped(self._address, kwargs), result)
        )
        outside = {_place(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
        outside -= self._own
        for each in tree_leaves(result):
            if isinstance(each, Tensor) and _place(each) not in outside:
                self._own.add(_place(each))

    def _address(self, value: Any) -> Any:
        if isinstance(value, Tensor) and _place(value) not in self._own:
            return _Outside(value)
        return value


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """`value` with all that stands in it changed, in its dataclasses too."""

    def changed(leaf: Any) -> Any:
        if not is_dataclass(leaf) or isinstance(leaf, type):
            return change(leaf)
        own = {each.name: getattr(leaf, each.name) for each in fields(leaf)}
        return replace(leaf, **_mapped(change, own))

    return tree_map(changed, value)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _inside(value: Any) -> Any:
    return value.tensor() if isinstance(value, _Outside) else value


class RecordingDevice:
    """See Device. `captured` and `replayed`: the recordings, in order; `seconds`: what a replay is
    said to take.
    """

    def __init__(self, seconds: Callable[[Recording], float] = lambda recording: 1.0) -> None:
        self.seconds = seconds
        self.captured: list[Recording] = []
        self.replayed: list[Recording] = []
        self.num_waits = 0
        self._results: dict[Recording, Tensor] = {}
        # What is uploaded and may not have been read yet: the buffer, and what it held.
        self._uploads: deque[tuple[Tensor, Tensor]] = deque()
        self._first_upload = 0
        # What has been computed, and where it is to arrive.
        self._downloads: list[tuple[Tensor, Tensor]] = []

    def host_buffer(self, num_bytes: int) -> Tensor:
        return torch.full((num_bytes,), 0xAB, dtype=torch.uint8)

    def upload(self, target: Tensor, source: Tensor) -> None:
        self._uploads.append((source, source.clone()))
        target.copy_(source)

    def download(self, target: Tensor, source: Tensor) -> None:
        self._downloads.append((target, source.clone()))

    def mark(self) -> Callable[[], None]:
        num_uploads, num_downloads = self._first_upload + len(self._uploads), len(self._downloads)

        @torch.inference_mode()
        def wait() -> None:
            self.num_waits += 1
            while self._first_upload < num_uploads:
                buffer, held = self._uploads.popleft()
                self._first_upload += 1
                assert torch.equal(buffer, held), "a buffer was filled while it was on its way"
            for target, arrived in self._downloads[:num_downloads]:
                target.copy_(arrived)
            self._downloads[:num_downloads] = [_ARRIVED] * num_downloads

        return wait

    def capture(self, call: Callable[[], _Result]) -> tuple[Callable[[], None], _Result]:
        recording = Recording()
        with _launches_to(recording), recording:
            result = call()
        self.captured.append(recording)
        self._results[recording] = result

        def replay() -> None:
            for other, lost in self._results.items():
                if other is not recording:
                    _lose(lost)
            recording.replay()
            self.replayed.append(recording)

        _lose(result)
        return replay, result

    def time(self, call: Callable[[], None]) -> float:
        return self.seconds(self.captured[-1])

    def release_memory(self) -> None:
        self._results.clear()


def _lose(result: Any) -> None:
    for tensor in tree_leaves(result):
        tensor.fill_(torch.nan)


@contextmanager
def _launches_to(recording: Recording) -> Iterator[None]:
    def noted(launch: GridExecutor | Launch, *args: Any, **kwargs: Any) -> None:
        recording.launch(launch, args, kwargs)

    with ExitStack() as patched:
        for kind in (GridExecutor, Launch):
            patched.enter_context(patch.object(kind, "__call__", noted))
        yield
