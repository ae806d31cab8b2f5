"""How much a model reads and writes in one request."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Context:
    """`length`: tokens of prompt and answer together; `longer`: what a user can do to get more;
    `keeps_states`: whether prompts go on from kept states, which stand here and there.
    """

    length: int
    longer: str
    keeps_states: bool = False
