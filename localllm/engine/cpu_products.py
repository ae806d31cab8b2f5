"""Makes float32 matrix products on a CPU give each row the same bits for any number of rows."""

import os
from pathlib import Path

# MKL's switch for this (oneMKL developer guide, "Obtaining Numerically Reproducible Results": in
# strict mode the order of a sum does not depend on the product's size or the number of threads).
_VARIABLE, _STRICT = "MKL_CBWR", "AUTO,STRICT"


def make_products_reproducible() -> None:
    """Set MKL's strict mode; takes effect only before the process's first matrix product.

    It is set on Intel's processors only: on others it is slow, and padding the rows is enough (see
    `Traits.row_unit`). A value that the user has set is kept.
    """
    try:
        is_intel = "GenuineIntel" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return
    if is_intel:
        os.environ.setdefault(_VARIABLE, _STRICT)
