"""How far the prompt of a request is."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PromptProgress:
    """`computed` of the prompt's `total` tokens, which are the share `work` of its operations: a
    later token reads more keys.
    """

    computed: int
    total: int
    work: float
