"""Float32 products on a CPU whose rows have the same bits however many rows there are."""

import os
from pathlib import Path

# MKL's switch for it (oneMKL developer guide, "Obtaining Numerically Reproducible Results": the
# strict mode makes the order of a sum independent of the product's size and of the threads).
_VARIABLE, _STRICT = "MKL_CBWR", "AUTO,STRICT"


def make_products_reproducible() -> None:
    """Ask for it. Holds only if the process has not multiplied matrices before.

    On Intel's processors; on others the mode is slow, and padding the rows is enough (see
    `Traits.row_unit`). Who has set the variable is not overruled.
    """
    try:
        is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    if is_intel:
        os.environ.setdefault(_VARIABLE, _STRICT)
