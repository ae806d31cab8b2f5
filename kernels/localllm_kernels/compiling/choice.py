"""Which operators are this library's, and which are left to torch."""

from dataclasses import dataclass
from enum import StrEnum


class Piece(StrEnum):
    """A piece that can be left to torch on its own, by the name that users see."""

    NORMS = "norms"
    ROTATION = "rotation and KV write"
    GATE = "gate"
    FEW_QUERIES = "attention of few queries"
    MANY_QUERIES = "attention of many queries"
    INT4 = "int4 products"
    INT8 = "int8 products"
    FP8 = "fp8 products"
    MXFP4 = "mxfp4 products"
    NVFP4 = "nvfp4 products"
    TRELLIS3 = "3-bit products"
    BLOCKS = "products with GGUF's blocks"
    EXPERTS = "experts"
    ROUTE = "choice of experts"
    SAMPLING = "sampling"
    RECURRENCES = "recurrences"
    # Alternative ways, used only where they were found right and faster than the first.
    FRAGMENTS = "int4 products by fragments"
    KEY_FRAGMENTS = "attention over 8-bit keys by fragments"


# Pieces whose torch operator waits for values that the device computes.
LOOKING = frozenset(
    (
        *(Piece.ROTATION, Piece.FEW_QUERIES, Piece.MANY_QUERIES),
        *(Piece.EXPERTS, Piece.RECURRENCES),
    )
)
# The pieces of a layer in few launches.
FUSED = frozenset((Piece.NORMS, Piece.ROTATION, Piece.FEW_QUERIES, Piece.INT4))


SECOND_WAYS = frozenset((Piece.FRAGMENTS, Piece.KEY_FRAGMENTS))


@dataclass(frozen=True, slots=True)
class Choice:
    """`to_torch`: the pieces that torch computes; `fragment_rows`: the numbers of rows for which
    products use the fragments; `key_fragments`: whether attention over 8-bit keys uses them.
    """

    to_torch: frozenset[Piece] = frozenset()
    fragment_rows: range = range(0)
    key_fragments: bool = False

    def __str__(self) -> str:
        """Always written in one way, since the keys of cached prefixes contain it."""
        rows = self.fragment_rows
        fragments = f"{rows.start}-{rows.stop - 1}" if rows else "0"
        return f"{','.join(sorted(self.to_torch))};{fragments};{int(self.key_fragments)}"


ALL_OWN = Choice()
