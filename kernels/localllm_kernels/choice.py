"""Which operators are this library's, and which are left to torch."""

from dataclasses import dataclass
from enum import StrEnum


class Piece(StrEnum):
    """What can be left to torch by itself, by the name that users read."""

    NORMS = "norms"
    ROTATION = "rotation and KV write"
    GATE = "gate"
    FEW_QUERIES = "attention of few queries"
    MANY_QUERIES = "attention of many queries"
    INT4 = "int4 products"
    INT8 = "int8 products"
    FP8 = "fp8 products"
    SAMPLING = "sampling"
    # Second ways, which are taken only where they were found right and faster than the first.
    FRAGMENTS = "int4 products by fragments"
    KEY_FRAGMENTS = "attention over 8-bit keys by fragments"


# Pieces of which torch's operator waits for values that the device computes.
LOOKING = frozenset((Piece.ROTATION, Piece.FEW_QUERIES, Piece.MANY_QUERIES))
# What a layer in few launches is made of.
FUSED = frozenset((Piece.NORMS, Piece.ROTATION, Piece.FEW_QUERIES, Piece.INT4))


SECOND_WAYS = frozenset((Piece.FRAGMENTS, Piece.KEY_FRAGMENTS))


@dataclass(frozen=True, slots=True)
class Choice:
    """`to_torch`: the pieces that torch computes; `fragment_rows`: the most rows of a product that
    take the fragments, 0 for none; `key_fragments`: whether attention over 8-bit keys does.
    """

    to_torch: frozenset[Piece] = frozenset()
    fragment_rows: int = 0
    key_fragments: bool = False

    def __str__(self) -> str:
        """In one way only, since the keys of cached prefixes contain it."""
        return f"{','.join(sorted(self.to_torch))};{self.fragment_rows};{int(self.key_fragments)}"


ALL_OWN = Choice()
