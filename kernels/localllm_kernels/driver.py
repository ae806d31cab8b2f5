"""Triton's own module for the GPU's driver, which it compiles at its first use."""

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
