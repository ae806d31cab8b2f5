"""What Triton compiles: its own module for the GPU's driver, and kernels at their first launch."""

from collections.abc import Iterator
from contextlib import contextmanager

import triton


class DriverError(Exception):
    """Triton cannot launch anything here."""


def start_driver() -> None:
    """Have the module made now, where torch's operators can still be taken in its place.

    Raises: DriverError, with what is missing.
    """
    try:
        triton.runtime.driver.active.get_current_device()
    except Exception as error:  # of a compiler, of a loader, of the driver
        reason = str(error).strip().partition("\n")[0]
        raise DriverError(
            "Triton cannot make its module for the GPU's driver, which needs a C compiler and "
            f"Python's headers (apt install gcc python3-dev): {type(error).__name__}: {reason:.200}"
        ) from error


class KernelCompiledError(Exception):
    """A kernel was compiled, and not launched."""


@contextmanager
def stopping_at_compilation() -> Iterator[None]:
    """Within it, the first launch whose kernel is not there yet has it compiled and raises
    KernelCompiledError. So whoever has time for one kernel at a time gets through a step of many.
    """

    def stop(**compiled: object) -> None:
        raise KernelCompiledError

    before = triton.knobs.runtime.jit_post_compile_hook
    triton.knobs.runtime.jit_post_compile_hook = stop
    try:
        yield
    finally:
        triton.knobs.runtime.jit_post_compile_hook = before
