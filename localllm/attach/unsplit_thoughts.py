"""Splits thoughts off an answer whose server left them in it."""

from localllm.text.thinking import FAMILIES, Split, ThinkingSplitter


class UnsplitThoughts:
    """Splits a growing answer that may begin with any family's opening marker."""

    def __init__(self) -> None:
        self._held = ""
        self._splitter: ThinkingSplitter | None = None

    def push(self, piece: str) -> Split:
        """What `piece` adds; what may become a marker is held back."""
        if self._splitter is not None:
            return self._splitter.push(piece)
        self._held += piece
        begun = self._held.lstrip()
        found = next((each for each in FAMILIES if begun.startswith(each.opens)), None)
        if found is None and any(each.opens.startswith(begun) for each in FAMILIES):
            return Split()
        self._splitter = ThinkingSplitter(found)
        return self._splitter.push(self._held if found is None else begun)

    def flush(self) -> Split:
        """What is still held back; call it at the end."""
        return Split(answer=self._held) if self._splitter is None else self._splitter.flush()
