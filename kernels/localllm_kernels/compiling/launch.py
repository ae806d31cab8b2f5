"""Shared by the launchers: absent tensors, and working memory."""

import torch
from torch import Tensor

from localllm_kernels.compiling.tiles import TileConfig, choose_tiles, vary_8_bits
from localllm_kernels.compiling.tunings import Tunings


def present(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """`tensor`, or `instead` for an argument that the kernel does not read."""
    return instead if tensor is None else tensor


# Of the slices in which a weight is dequantized.
MIN_SLICE_BYTES, MAX_SLICE_BYTES = 16 << 20, 64 << 20


class Workspace:
    """Memory that the launches on one stream use one after another.

    `num_processors` and `capability` (as 90) of the device determine the tiles; `splits`: whether
    sums may be split among programs. `fragment_rows`: the numbers of rows for which products use
    the kernel that reads operands as the matrix units want them; `key_fragments`: whether attention
    over 8-bit keys does.

    `overlaps`: whether a launch may start while the one before still runs, and waits in the kernel
    until that one has ended ("Programmatic Dependent Launch", CUDA C++ Programming Guide; 9.0).
    """

    def __init__(
        self,
        device: torch.device,
        *,
        splits: bool = True,
        tunings: Tunings | None = None,
        fragment_rows: range = range(0),
        key_fragments: bool = False,
    ) -> None:
        self.tunings = tunings or Tunings()
        self.splits = splits
        self.fragment_rows, self.key_fragments = fragment_rows, key_fragments
        self.num_processors, self.capability, self.slice_bytes = 1, 80, MIN_SLICE_BYTES
        self.overlaps = False
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            self.num_processors = properties.multi_processor_count
            self.capability = 10 * properties.major + properties.minor
            self.overlaps = self.capability >= 90 and torch.version.hip is None
            # A dequantized slice is read again at once, and stays in the L2 cache until then.
            in_cache = getattr(properties, "L2_cache_size", 0) * 3 // 4
            self.slice_bytes = min(max(in_cache, self.slice_bytes), MAX_SLICE_BYTES)
        self._parts = torch.empty(0, dtype=torch.float32, device=device)
        self._own = self._parts
        self._slice = torch.empty(0, dtype=torch.uint8, device=device)
        self._counters = torch.zeros(0, dtype=torch.int32, device=device)
        # Captured launches go on using these.
        self._outgrown: list[Tensor] = []

    @property
    def launch_options(self) -> dict[str, bool]:
        """Options of a launch whose kernel waits for the one before by itself."""
        return {"launch_pdl": True} if self.overlaps else {}

    def splits_for(self, num_tasks: int) -> int:
        """Programs per task such that each processor has two; one if sums are not split."""
        if self.num_processors == 1 or not self.splits:
            return 1
        return max(1, 2 * self.num_processors // max(1, num_tasks))

    def parts(self, count: int) -> Tensor:
        """At least `count` uninitialised floats."""
        if self._parts.numel() < count:
            self._outgrown.append(self._parts)
            self._parts = self._parts.new_empty(max(count, 2 * self._parts.numel()))
        return self._parts

    def own(self, count: int) -> Tensor:
        """At least `count` uninitialised floats, which `parts` leaves alone."""
        if self._own.numel() < count:
            self._outgrown.append(self._own)
            self._own = self._own.new_empty(max(count, 2 * self._own.numel()))
        return self._own

    def slice(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Uninitialised values [num_rows, width]; the same memory each time."""
        size = num_rows * width * dtype.itemsize
        if self._slice.numel() < size:
            self._outgrown.append(self._slice)
            self._slice = self._slice.new_empty(max(size, self.slice_bytes))
        return self._slice[:size].view(dtype).view(num_rows, width)

    def counters(self, count: int) -> Tensor:
        """At least `count` counters, all zero; launches leave them at zero, see `arrival.py`."""
        if self._counters.numel() < count:
            self._outgrown.append(self._counters)
            self._counters = self._counters.new_zeros(max(count, 2 * self._counters.numel()))
        return self._counters


def tile_config(
    kernel: str, num_rows: int, width_out: int, width_in: int, workspace: Workspace
) -> TileConfig:
    """The tiles of a kernel with 8-bit weights."""
    rows = row_bucket(num_rows)
    return workspace.tunings.config(
        kernel,
        (rows, width_out, width_in),
        lambda: choose_tiles(
            rows, width_out, width_in, workspace.num_processors if workspace.splits else 1
        ),
        vary_8_bits,
    )


def row_bucket(num_rows: int) -> int:
    """The bucket that a number of rows belongs to; tiles are chosen once per bucket."""
    return next((most for most in (1, 16, 32, 64, 128, 256, 512, 1024) if num_rows <= most), 2048)
