"""How a product is cut into tiles, and the alternatives to try."""

from dataclasses import dataclass, replace

MIN_STEPS = 4  # per split: with fewer, adding up costs more than splitting saves


@dataclass(frozen=True, slots=True)
class TileConfig:
    """Rows, outputs and inputs of a tile; programs that share the inputs; warps per program; turns
    of a program's loop whose weights are brought into the L2 cache ahead, see int4_turn.py.
    """

    block_m: int
    block_n: int
    block_k: int
    num_splits: int
    num_warps: int
    ahead: int = 0

    def grid(self, num_rows: int, width_out: int) -> tuple[int, int, int]:
        """Programs: by outputs, by rows, by parts of the inputs."""
        return (
            -(-width_out // self.block_n),
            -(-num_rows // self.block_m),
            self.num_splits,
        )

    def num_tasks(self, num_rows: int, width_out: int) -> int:
        """Tiles of the result."""
        by_outputs, by_rows, _ = self.grid(num_rows, width_out)
        return by_outputs * by_rows

    def num_part_values(self, num_tasks: int) -> int:
        """Floats that all parts take together; 0 if there is only one part."""
        if self.num_splits == 1:
            return 0
        return num_tasks * self.num_splits * self.block_m * self.block_n


@dataclass(frozen=True, slots=True)
class Ranges:
    """The least and the greatest outputs and inputs of a tile that are worth trying."""

    block_n: tuple[int, int]
    block_k: tuple[int, int]


MAX_SPLITS, MAX_WARPS = 64, 16


def neighbours(config: TileConfig, ranges: Ranges) -> list[TileConfig]:
    """`config` with one of its numbers halved or doubled, within the ranges; rows never change."""
    bounds = {
        "block_n": ranges.block_n,
        "block_k": ranges.block_k,
        "num_splits": (1, MAX_SPLITS),
        "num_warps": (1, MAX_WARPS),
    }
    found = []
    for name, (low, high) in bounds.items():
        value = getattr(config, name)
        for other in (value // 2, value * 2):
            if low <= other <= high:
                found.append(replace(config, **{name: other}))
    return found


def vary_8_bits(config: TileConfig) -> list[TileConfig]:
    """The alternatives for kernels with 8-bit weights."""
    return neighbours(config, Ranges((32, 256), (32, 256)))


def choose_tiles(num_rows: int, width_out: int, width_in: int, num_processors: int) -> TileConfig:
    """Tiles such that each processor of the GPU has two programs, if there is enough work."""
    if num_rows <= 64:
        block_m = max(16, 1 << (num_rows - 1).bit_length())
        block_n, block_k, num_warps = (64, 128, 4) if block_m <= 32 else (64, 64, 4)
    else:
        block_m, block_n, block_k, num_warps = 128, 128, 64, 8
    num_tasks = -(-width_out // block_n) * -(-num_rows // block_m)
    wanted = -(-2 * num_processors // num_tasks)
    most = max(1, -(-width_in // block_k) // MIN_STEPS)
    return TileConfig(block_m, block_n, block_k, min(wanted, most), num_warps)
