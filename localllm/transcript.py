"""What was said in a conversation, apart from the model that says it."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from localllm.engine.request import FinishReason

ChatMessage = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer, as far as it came.

    `finish_reason` None: it was interrupted, or is still being said. `token_ids` are the answer's
    own, thoughts included, in the vocabulary of `model`.
    """

    question: str
    model: str = ""
    answer: str = ""
    thinking: str = ""
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] = ()

    @property
    def messages(self) -> list[ChatMessage]:
        """As a chat template reads it. Thoughts go beside the answer, under the two names that
        templates know; a template that feeds them back, or drops them, does as it was written to.
        """
        said: ChatMessage = {"role": "assistant", "content": self.answer}
        if self.thinking:
            said |= {"reasoning_content": self.thinking, "thinking": self.thinking}
        return [{"role": "user", "content": self.question}, said]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole conversation; `model` answers it now, each turn names its own."""

    model: str
    system: str | None
    turns: Sequence[Turn]

    @property
    def messages(self) -> list[ChatMessage]:
        """The system prompt and all turns."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *(message for turn in self.turns for message in turn.messages)]

    def to_json(self) -> str:
        """An object with `model` and `messages`."""
        exported = {"model": self.model, "messages": self.messages}
        return json.dumps(exported, ensure_ascii=False, indent=2) + "\n"

    def to_markdown(self) -> str:
        """A heading for each message."""
        parts = [f"## {message['role']}\n\n{message['content']}\n" for message in self.messages]
        return "\n".join([f"# Conversation with {self.model}\n", *parts])


def make_title(question: str, num_chars: int = 60) -> str:
    """The first words of a question, on one line."""
    words = " ".join(question.split())
    return words if len(words) <= num_chars else words[: num_chars - 1].rstrip() + "…"
