"""Triton's compilations: its own module for the GPU's driver, and kernels at their first launch."""

from collections.abc import Iterator
from contextlib import contextmanager

import triton


def is_interpreting() -> bool:
    """Whether Triton interprets kernels in Python: TRITON_INTERPRET=1."""
    return bool(triton.knobs.runtime.interpret)


class DriverError(Exception):
    """Triton cannot launch anything here."""


def start_driver() -> None:
    """Build the module now, while torch's operators can still be used instead.

    Raises: DriverError, naming what is missing.
    """
    try:
        triton.runtime.driver.active.get_current_device()
    except Exception as error:  # of a compiler, of a loader, of the driver
        reason = str(error).strip().partition("\n")[0]
        raise DriverError(
            "Triton cannot build its module for the GPU driver, which needs a C compiler and "
            f"Python's headers (apt install gcc python3-dev): {type(error).__name__}: {reason:.200}"
        ) from error


def why_no_kernels() -> str | None:
    """Why Triton's kernels cannot be launched on this GPU, and what would help; or None."""
    try:
        start_driver()
    except DriverError as error:
        return str(error)
    return None


class KernelCompiledError(Exception):
    """A kernel was compiled but not launched."""


@contextmanager
def stopping_at_compilation() -> Iterator[None]:
    """While the block runs, the first launch of a kernel that is not compiled yet compiles it and
    raises KernelCompiledError. A caller with time for one kernel at a time can thus prepare a step.
    """

    def stop(**compiled: object) -> None:
        raise KernelCompiledError

    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = stop
    try:
        yield
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
