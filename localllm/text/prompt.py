"""What a model is given to read, and how to read its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from localllm.text.thinking import Markers

# As in the hub's chat templates: a role, a content, and anything else that a template knows.
ChatMessage = Mapping[str, Any]
ThinkLevel = Literal["off", "on", "low", "medium", "high"]
THINK_LEVELS: tuple[ThinkLevel, ...] = get_args(ThinkLevel)


@dataclass(frozen=True, slots=True)
class Text:
    """A text, or its token ids, that a model completes as it stands.

    Text that looks like a special token is plain text unless `parse_special`. `add_special`: it
    begins with the tokenizer's own start token.
    """

    content: str | Sequence[int]
    parse_special: bool = False
    add_special: bool = True


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that a model answers; a model without a chat template completes their text.

    `tools`: functions that it may call, as OpenAI's API describes them; `parse_special`: see Text;
    `variables`: of the chat template, besides these.
    """

    messages: Sequence[ChatMessage]
    tools: Sequence[Mapping[str, Any]] | None = None
    think: ThinkLevel | None = None
    parse_special: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The text of its messages."""
        return "\n\n".join(str(message.get("content") or "") for message in self.messages)


@dataclass(frozen=True, slots=True)
class Prompt:
    """Token ids, and how the tokens that follow become text.

    `is_thinking`: the prompt ends inside the model's thoughts. `num_said`: how many tokens at its
    end are the beginning of the answer. `num_context`: how many tokens before those are text that
    the answer continues, so that a space between them is kept. `marks` are texts of special tokens
    to show in the answer, besides the markers. `borders`: where its messages end. `num_to_keep`:
    how many tokens at its beginning the cache should keep for longer than others. `changes`: what
    was changed so that the chat template takes the conversation.
    """

    token_ids: Sequence[int]
    markers: Markers | None = None
    is_thinking: bool = False
    num_context: int = 0
    num_said: int = 0
    marks: tuple[str, ...] = ()
    borders: tuple[int, ...] = ()
    num_to_keep: int = 0
    changes: tuple[str, ...] = ()

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

    def begun(self, said: Sequence[int]) -> "Prompt":
        """The same prompt, whose answer begins with `said`."""
        asked = self.token_ids[: len(self.token_ids) - self.num_said]
        return replace(self, token_ids=[*asked, *said], num_said=len(said))


Asked = Text | Conversation | Prompt
