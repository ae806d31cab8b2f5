"""Holds back the space at the end of a growing text."""


class TrailingSpace:
    """Space before a tool call is not part of the answer: a client that sends it back would have
    the template write it twice, and everything behind it would be computed again.
    """

    def __init__(self) -> None:
        self._held = ""

    def push(self, piece: str) -> str:
        """The text that is certain not to be at the end."""
        text = self._held + piece
        said = text.rstrip()
        self._held = text[len(said) :]
        return said

    def flush(self) -> str:
        """What was held back, of a text that ends with it."""
        held, self._held = self._held, ""
        return held
