"""The search for a mark in text that comes in pieces, where some of the text is quoted."""

import re

from localllm.text.stop_strings import longest_overlap


class EndOutsideQuotes:
    """Finds the mark that ends a call; from `opens` to `closes` it is text.

    Each character is read only a few times, however long the call is.
    """

    def __init__(self, mark: str, opens: str, closes: str) -> None:
        self._mark, self._opens, self._closes = mark, opens, closes
        self._outside = re.compile(f"{re.escape(opens)}|{re.escape(mark)}")
        self._is_inside, self._overlap = False, ""

    def find(self, piece: str) -> int:
        """The position after the mark in `piece`; -1 if the call does not end there."""
        seen, at = self._overlap + piece, 0
        while True:
            if self._is_inside:
                place = seen.find(self._closes, at)
                if place < 0:
                    break
                at, self._is_inside = place + len(self._closes), False
                continue
            found = self._outside.search(seen, at)
            if found is None:
                break
            at = found.end()
            if found[0] == self._mark:
                return at - len(self._overlap)
            self._is_inside = True
        rest = seen[at:]
        marks = (self._closes,) if self._is_inside else (self._opens, self._mark)
        keep = max(longest_overlap(rest, mark) for mark in marks)
        self._overlap = rest[len(rest) - keep :]
        return -1
