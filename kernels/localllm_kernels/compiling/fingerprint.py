"""A fingerprint of the kernels' code: what was measured with other code no longer holds."""

import hashlib
from functools import cache
from pathlib import Path


@cache
def sources_fingerprint() -> str:
    """Twelve hexadecimal digits over all files of Triton's kernels."""
    digest = hashlib.sha256()
    for source in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:12]


def triton_version() -> str:
    """The version of the compiler, which is imported only where it is used."""
    import triton

    return str(triton.__version__)
