"""What a model is given to read, and how its answer is to be read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from localllm.text.thinking import Markers

# As in the hub's chat templates: a role, a content, and what else a template knows.
ChatMessage = Mapping[str, Any]
ThinkLevel = Literal["off", "on", "low", "medium", "high"]
THINK_LEVELS: tuple[ThinkLevel, ...] = get_args(ThinkLevel)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how the tokens that follow become text.

    `is_thinking`: the prompt ends inside the model's thoughts. `num_context`: so many tokens at its
    end are text that the answer goes on from, so that the space between them is kept. `num_said`:
    so many at its end are the answer's own beginning. `marks` are texts of special tokens that are
    to be seen in the answer, besides the markers.
    """

    token_ids: Sequence[int]
    markers: Markers | None = None
    is_thinking: bool = False
    num_context: int = 0
    num_said: int = 0
    marks: tuple[str, ...] = ()

    @property
    def shown(self) -> str:
        """Texts of special tokens that are part of the answer's text."""
        return "".join((*(self.markers.texts if self.markers else ()), *self.marks))

    @property
    def context(self) -> Sequence[int]:
        """The tokens of `num_context`."""
        end = len(self.token_ids) - self.num_said
        return self.token_ids[end - self.num_context : end]

    @property
    def said(self) -> Sequence[int]:
        """The tokens of `num_said`."""
        return self.token_ids[len(self.token_ids) - self.num_said :]
