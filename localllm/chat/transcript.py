"""What was said in a conversation, independent of the model."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from localllm.schedule.request import FinishReason
from localllm.text.prompt import ChatMessage

# The question that is kept with a summary in place of older turns.
SUMMARY_REQUEST = (
    "Summarise our conversation so far, so that it can go on from your summary alone: what was "
    "asked, what was found or decided, names, figures and code that will be needed again, and what "
    "is still open. Leave out greetings and what was given up."
)


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer so far.

    `finish_reason` is None if the answer was interrupted or is still in progress. `token_ids` are
    those of the answer, thoughts included, in the vocabulary of `model`. `figures` is the line that
    the page shows under the answer: how many tokens, how fast.
    """

    question: str
    model: str = ""
    answer: str = ""
    thinking: str = ""
    finish_reason: FinishReason | None = None
    token_ids: tuple[int, ...] = ()
    figures: str = ""

    @property
    def is_answered(self) -> bool:
        """Whether there is an answer, even one that ended empty."""
        return bool(self.answer or self.thinking or self.token_ids or self.finish_reason)

    def continues(self, earlier: "Turn") -> bool:
        """Whether this is the same question, with at least as much of the same answer."""
        return (
            self.question == earlier.question
            and self.answer.startswith(earlier.answer)
            and self.thinking.startswith(earlier.thinking)
        )

    @property
    def messages(self) -> list[ChatMessage]:
        """The turn as a chat template reads it. Thoughts go beside the answer, under the two names
        that templates know; each template feeds them back or drops them, as it was written to.
        """
        asked: dict[str, Any] = {"role": "user", "content": self.question}
        if not self.is_answered:
            return [asked]
        said: dict[str, Any] = {"role": "assistant", "content": self.answer}
        if self.thinking:
            said |= {"reasoning_content": self.thinking, "thinking": self.thinking}
        return [asked, said]


@dataclass(frozen=True, slots=True)
class Transcript:
    """A whole conversation; `model` is the current one, and each turn names its own.

    `title` is what its user wrote first, if files came with it; empty: the first question says it.
    """

    model: str
    system: str | None
    turns: Sequence[Turn]
    title: str = ""

    @property
    def messages(self) -> list[ChatMessage]:
        """The system prompt and all turns."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *(message for turn in self.turns for message in turn.messages)]

    def asking(self, question: str, model: str) -> "Transcript":
        """The conversation with a question to `model` at its end that has no answer yet."""
        turns, last = [*self.turns], Turn(question, model)
        if turns and not turns[-1].is_answered and turns[-1].question == question:
            turns.pop()  # it is asked again
        return replace(self, turns=(*turns, last))

    def continues(self, earlier: "Transcript") -> bool:
        """Whether this holds all that `earlier` does."""
        pairs = zip(self.turns, earlier.turns, strict=False)
        return len(self.turns) >= len(earlier.turns) and all(
            turn.continues(old) for turn, old in pairs
        )

    def to_json(self) -> str:
        """An object with `model` and `messages`; each answer among them names its own model."""
        models = iter([turn.model for turn in self.turns if turn.is_answered])
        messages = [
            {**message, "model": next(models)} if message["role"] == "assistant" else message
            for message in self.messages
        ]
        exported = {"model": self.model, "messages": messages}
        return json.dumps(exported, ensure_ascii=False, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Transcript":
        """Read what `to_json` wrote, which has no token ids. Raises: ValueError."""
        try:
            raw = json.loads(text)
            text.encode()
        except RecursionError as error:
            raise ValueError("it is nested too deeply") from error
        messages = raw.get("messages") if isinstance(raw, dict) else None
        if not isinstance(messages, list) or not all(map(_is_message, messages)):
            raise ValueError("it must have `messages`, each with a role and a text as content")
        system = None
        if messages and messages[0]["role"] == "system":
            system, messages = messages[0]["content"], messages[1:]
        model, turns = str(raw.get("model") or ""), []
        for message in messages:
            if message["role"] == "user":
                turns.append(Turn(message["content"], model))
                continue
            if message["role"] == "system" or not turns or turns[-1].is_answered:
                raise ValueError("an answer must follow its question")
            turns[-1] = Turn(
                turns[-1].question,
                str(message.get("model") or model),
                message["content"],
                str(message.get("thinking") or ""),
                FinishReason.STOP,
            )
        return cls(model, system, tuple(turns))

    def to_markdown(self) -> str:
        """A heading for each message."""
        parts = [f"## {message['role']}\n\n{message['content']}\n" for message in self.messages]
        return "\n".join([f"# Conversation with {self.model}\n", *parts])


def _is_message(value: object) -> bool:
    return (
        isinstance(value, dict)
        and value.get("role") in ("system", "user", "assistant")
        and isinstance(value.get("content"), str)
    )


def make_title(question: str, num_chars: int = 60) -> str:
    """The first words of a question, on one line."""
    words = " ".join(question.split())
    return words if len(words) <= num_chars else words[: num_chars - 1].rstrip() + "…"
