"""The target's hidden states of a text, until a follower has used them up."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass(slots=True)
class HiddenRows:
    """Those from position `start` up to `end`; most are never looked at.

    `parts`: tensors, each with the places where its share begins and ends.
    """

    start: int = 0
    end: int = 0
    parts: list[tuple[Tensor, int, int]] = field(default_factory=list)

    def add(self, start: int, rows: Tensor, first: int, last: int) -> bool:
        """Take those from position `start` on, which `rows` holds from `first` to `last`, in place
        of older ones there; False if some before them are missing.
        """
        if start > self.end:
            return False
        if start < self.end:
            self.parts = self._cut(self.start, start)
            self.start = min(self.start, start)
        self.parts.append((rows, first, last))
        self.end = start + last - first
        return True

    def drop_before(self, start: int) -> None:
        """Drop those before position `start`."""
        self.parts = self._cut(start, self.end)
        self.start = min(max(start, self.start), self.end)

    def between(self, start: int, end: int) -> list[Tensor]:
        """Those from `start` up to `end`."""
        return [
            rows if last - first == rows.shape[0] else rows[first:last]  # faster than `len`
            for rows, first, last in self._cut(start, end)
        ]

    def _cut(self, start: int, end: int) -> list[tuple[Tensor, int, int]]:
        found, position = [], self.start
        for rows, first, last in self.parts:
            low = max(first, first + start - position)
            high = min(last, first + end - position)
            if low < high:
                found.append((rows, low, high))
            position += last - first
        return found
