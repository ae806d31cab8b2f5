"""Write the tables of GGUF's IQ types that hold grids of values, from the format's own package.

    pip install gguf
    python tools/gguf_grids.py

They are part of the format, and cannot be worked out. `tests/model/test_gguf_blocks.py` compares
the values of blocks with those of the package.
"""

import sys
from pathlib import Path

import gguf.quants as quants
import numpy as np

TYPES = ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S")
PLACE = Path(__file__).parents[1] / "localllm/model/packed/grids.npz"


def main() -> int:
    """Write the file; returns 0."""
    grids = {}
    for name in TYPES:
        kind = getattr(quants, name)
        kind.init_grid()
        grids[name] = kind.grid.reshape(kind.grid_shape).astype(np.int8)
    np.savez_compressed(PLACE, **grids)
    return 0


if __name__ == "__main__":
    sys.exit(main())
