"""The C products compiled with other flags than this processor's."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from localllm_kernels.cpu import build
from localllm_kernels.cpu.build import load_library
from localllm_kernels.cpu.declarations import Declarations
from localllm_kernels.cpu.linear import CpuLinears
from localllm_kernels.cpu.team import Team

OWN = Path(build.__file__).parent


def sources_of_products() -> list[Path]:
    """The sources that products with weights need."""
    kinds = ("float32", "bfloat16", "integer", "block")
    linears = [OWN / f"{kind}_linear.c" for kind in kinds]
    return [*linears, OWN / "products.c", OWN / "team.c", OWN / "tiles.c"]


def linears_with(flags: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> CpuLinears:
    """Products that are compiled with these flags too. Raises: BuildError."""
    # Compiling is what takes long here; what is optimised does not change a bit.
    monkeypatch.setattr(build, "_FLAGS", (*build._FLAGS, *flags, "-O1"))
    lanes = folder / "lanes.c"
    lanes.write_text(f'#include "{OWN / "common.h"}"\nconst int64_t lanes = LANES;\n')
    sources = [*sources_of_products(), lanes]
    text = "\n".join(path.read_text("utf-8") for path in sources)
    monkeypatch.setattr(build, "_SOURCES", sources)
    monkeypatch.setattr(build, "DECLARATIONS", Declarations(text))
    return CpuLinears(load_library(folder), Team())
