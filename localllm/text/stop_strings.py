"""Finds stop strings in streamed text, across pieces, and never shows part of one."""

from collections.abc import Sequence


class StopMatcher:
    """Passes text through, except what may turn out to be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""
        self.stopped_by: str | None = None

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string is complete; it is in `stopped_by`."""
        return self.stopped_by is not None

    def push(self, piece: str) -> str:
        """The text that is safe to show; once a stop string is complete, all before it."""
        if not self._stops:
            return piece
        text = self._held + piece
        found = [(place, stop) for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            place, self.stopped_by = min(found)
            self._held = ""
            return text[:place]
        keep = max(longest_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The text that was held back; call it when no more text comes."""
        held, self._held = self._held, ""
        return held


def longest_overlap(text: str, target: str) -> int:
    """Length of the longest end of `text` that is a beginning of `target`, but not all of it."""
    for length in range(min(len(target) - 1, len(text)), 0, -1):
        if text.endswith(target[:length]):
            return length
    return 0
