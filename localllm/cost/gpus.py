"""GPUs by their data sheets: memory, bandwidth and arithmetic.

Memory and bandwidth are the maker's figures. Operations are those of bfloat16 products with sums in
float32, without sparsity; GeForce cards reach half the advertised rate there. The figures come from
tables that quote NVIDIA's and at times differ by a few per cent. None: not found. Laptop GPUs vary
with their power limit.
"""

import difflib
import re
from dataclasses import dataclass

from localllm.errors import CatalogError, ExitCode


@dataclass(frozen=True, slots=True)
class GpuCard:
    """One GPU."""

    title: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    operations_per_s: float | None
    host_bytes_per_s: float


# Assumed: copies reach four fifths of PCI Express' nominal rate, which is 31.5 GB/s for version 4
# with 16 lanes. The cards with 8 lanes, all whose title begins so, and those with version 5.
PCIE_4_BYTES_PER_S = 25e9
_EIGHT_LANES = ("RTX 3050", "RTX 4060", "RTX 4070 Laptop", "RTX 5060")
_VERSION_5 = ("RTX 50", "H100", "H200", "RTX PRO")


def _host_rate(title: str) -> float:
    return (
        PCIE_4_BYTES_PER_S
        * (0.5 if title.startswith(_EIGHT_LANES) else 1)
        * (2 if title.startswith(_VERSION_5) else 1)
    )


# Name, title, GB of 1024^3 bytes, GB/s, TFLOP/s.
_ROWS: tuple[tuple[str, str, int, float, float | None], ...] = (
    ("rtx-3050-8gb", "RTX 3050 8GB", 8, 224, 18.2),
    ("rtx-3060-12gb", "RTX 3060 12GB", 12, 360, 25.5),
    ("rtx-3060-ti", "RTX 3060 Ti", 8, 448, 32.39),
    ("rtx-3070", "RTX 3070", 8, 448, 40.6),
    ("rtx-3080-10gb", "RTX 3080 10GB", 10, 760, 59.5),
    ("rtx-3080-ti", "RTX 3080 Ti", 12, 912, 68.2),
    ("rtx-3090", "RTX 3090", 24, 936, 71.2),
    ("rtx-3090-ti", "RTX 3090 Ti", 24, 1008, 80.0),
    ("rtx-4060", "RTX 4060", 8, 272, 30.23),
    ("rtx-4060-ti-8gb", "RTX 4060 Ti 8GB", 8, 288, 44.1),
    ("rtx-4060-ti-16gb", "RTX 4060 Ti 16GB", 16, 288, 44.1),
    ("rtx-4070", "RTX 4070", 12, 504, 58.3),
    ("rtx-4070-super", "RTX 4070 Super", 12, 504, 70.9),
    ("rtx-4070-ti", "RTX 4070 Ti", 12, 504, 80.2),
    ("rtx-4070-ti-super", "RTX 4070 Ti Super", 16, 672, 88.2),
    ("rtx-4080", "RTX 4080", 16, 716.8, 97.5),
    ("rtx-4080-super", "RTX 4080 Super", 16, 736, 104.4),
    ("rtx-4090", "RTX 4090", 24, 1008, 165.15),
    ("rtx-4060-laptop", "RTX 4060 Laptop", 8, 256, 28.26),
    ("rtx-4070-laptop", "RTX 4070 Laptop", 8, 256, None),
    ("rtx-4080-laptop", "RTX 4080 Laptop", 12, 432, 67.4),
    ("rtx-4090-laptop", "RTX 4090 Laptop", 16, 576, 79.38),
    ("rtx-5060", "RTX 5060", 8, 448, None),
    ("rtx-5060-ti-16gb", "RTX 5060 Ti 16GB", 16, 448, 47.4),
    ("rtx-5070", "RTX 5070", 12, 672, 61.7),
    ("rtx-5070-ti", "RTX 5070 Ti", 16, 896, 87.9),
    ("rtx-5080", "RTX 5080", 16, 960, 112.6),
    ("rtx-5090", "RTX 5090", 32, 1792, 209.5),
    ("rtx-a2000-12gb", "RTX A2000 12GB", 12, 288, None),
    ("rtx-a4000", "RTX A4000", 16, 448, 76.7),
    ("rtx-a5000", "RTX A5000", 24, 768, 111.1),
    ("rtx-a6000", "RTX A6000", 48, 768, 154.8),
    ("rtx-4000-ada", "RTX 4000 Ada", 20, 360, None),
    ("rtx-6000-ada", "RTX 6000 Ada", 48, 960, 364.0),
    ("l4", "L4", 24, 300, 121.0),
    ("l40s", "L40S", 48, 864, 362.05),
    ("a10", "A10", 24, 600, 125.0),
    ("a100-40gb-pcie", "A100 40GB PCIE", 40, 1555, 312.0),
    ("a100-40gb-sxm", "A100 40GB SXM", 40, 1555, 312.0),
    ("a100-80gb-sxm", "A100 80GB SXM", 80, 2039, 312.0),
    ("h100-sxm", "H100 SXM", 80, 3350, 989.4),
    ("h100-pcie", "H100 PCIE", 80, 2039, 756.5),
    ("h200", "H200", 141, 4800, 989.0),
    ("rtx-pro-6000-blackwell", "RTX PRO 6000 Blackwell", 96, 1792, 503.8),
)
GPUS = {
    name: GpuCard(
        title,
        memory << 30,
        1e9 * bandwidth,
        None if rate is None else 1e12 * rate,
        _host_rate(title),
    )
    for name, title, memory, bandwidth, rate in _ROWS
}


def find_gpu(name: str) -> GpuCard:
    """The GPU of this name, however it is spelt; if several match, the smallest and slowest.

    Raises: CatalogError (exit code 2).
    """
    spelt = _plain(name)
    found = [
        card
        for known, card in GPUS.items()
        if re.fullmatch(rf"(rtx)?{re.escape(spelt)}([0-9]+gb)?(sxm|pcie)?", _plain(known))
    ]
    if spelt and found:
        return min(found, key=lambda card: (card.memory_bytes, card.bandwidth_bytes_per_s))
    near = difflib.get_close_matches(name.lower(), GPUS, n=3, cutoff=0.3)
    raise CatalogError(
        f"unknown GPU {name!r:.60}",
        where=f"nearest: {', '.join(near)}" if near else "",
        hint="localllm plan --gpu list (NVIDIA, RTX 30 or newer), or give its memory: --vram 8GiB",
        exit_code=ExitCode.USAGE,
    )


def _plain(name: str) -> str:
    letters = "".join(char for char in name.lower() if char.isalnum())
    return letters.removeprefix("nvidia").removeprefix("geforce")
