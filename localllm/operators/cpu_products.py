"""Makes matrix products on a CPU give the same bits for any number of rows and of threads."""

import os
from pathlib import Path

import torch

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


def products_ignore_threads(dtype: torch.dtype, cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether torch's products are known to have the same bits with any number of threads.

    Those in bfloat16 are where the processor multiplies such numbers itself. Where torch takes
    other instructions, some sums differ: on a Xeon with AVX512 but without AVX512_BF16, one to
    three elements of a product (torch 2.13).
    """
    if dtype != torch.bfloat16:
        return True
    try:
        words = set(cpuinfo.read_text().split())
    except OSError:
        return False
    return not words.isdisjoint(("avx512_bf16", "amx_bf16"))
