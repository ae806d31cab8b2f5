"""Rows of text in aligned columns."""

from collections.abc import Collection, Iterable, Sequence


def aligned(rows: Iterable[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """A line for each row, its columns two blanks apart; those in `right` end where they align."""
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    lines = []
    for row in listed:
        places = enumerate(zip(row, widths, strict=True))
        cells = (cell.rjust(w) if i in right else cell.ljust(w) for i, (cell, w) in places)
        lines.append("  ".join(cells).rstrip())
    return lines
