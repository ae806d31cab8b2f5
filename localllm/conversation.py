"""A conversation: messages that grow by questions and answers, and can be taken back."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from localllm.completion import Completion
from localllm.config import SamplingParams
from localllm.engine.request import FinishReason
from localllm.errors import RequestError
from localllm.prompt import Prompt, ThinkLevel
from localllm.session import LoadedModel
from localllm.text_engine import EventStream

ChatMessage = dict[str, str]


class ChatSession:
    """A system prompt, the messages so far, and the model that answers them.

    Every method that asks returns what `LoadedModel.stream` does. The answer joins the messages
    when its stream ends or is closed, as far as it was read, so that an interrupted one is kept;
    one that failed leaves the messages as they were. `raw`, and a model without a chat template,
    complete each text by itself.
    """

    def __init__(self, model: LoadedModel, system: str | None = None, *, raw: bool = False) -> None:
        self.model = model
        self.system = system
        self.raw = raw
        self.think: ThinkLevel | None = None
        self.parse_special = False
        self.messages: list[ChatMessage] = []
        self._last: tuple[Prompt, Completion] | None = None

    @property
    def completes_text(self) -> bool:
        """Whether a text is continued, rather than answered."""
        return self.raw or not self.model.tokenizer.has_chat_template

    @property
    def num_turns(self) -> int:
        """Answers so far."""
        return sum(message["role"] == "assistant" for message in self.messages)

    def reply(self, text: str, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Ask `text`. Raises: RequestError, TemplateError."""
        asked = {"role": "user", "content": text}
        return self._ask([*self.messages, asked], params)

    def regenerate(self, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Answer the last question anew; the old answer is kept if this one fails.

        Raises: RequestError where nothing was asked.
        """
        if not self.messages:
            raise RequestError("there is no answer yet", hint="ask something first")
        return self._ask(self.messages[:-1], params)

    def resume(self, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Go on with the last answer, which was interrupted or cut; its KV is still cached.

        The completion holds what is new. Raises: RequestError where there is nothing to go on with.
        """
        if self._last is None:
            raise RequestError("there is no answer to go on with", hint="ask something first")
        prompt, earlier = self._last
        if earlier.finish_reason is FinishReason.STOP:
            raise RequestError("the answer is complete", hint="ask the next question, or /regen")
        said = [token.token_id for token in earlier.samples[0].tokens]
        prompt = replace(
            prompt,
            token_ids=[*prompt.token_ids, *said],
            num_said=prompt.num_said + len(said),
        )
        return self._stream(prompt, self.messages[:-1], params)

    def undo(self) -> ChatMessage | None:
        """Take back the last question with its answer; returns the question, None without one."""
        if not self.messages:
            return None
        question = self.messages[-2]
        self.messages = self.messages[:-2]
        self._last = None
        return question

    def clear(self) -> None:
        """Forget all messages; the system prompt stays."""
        self.messages, self._last = [], None

    def change_model(self, model: LoadedModel) -> None:
        """Go on with another model, which reads the conversation as it is."""
        self.model, self._last = model, None

    def _ask(
        self, history: Sequence[ChatMessage], params: SamplingParams
    ) -> tuple[Completion, EventStream]:
        if self.completes_text:
            text = history[-1]["content"]
            prompt = self.model.text_prompt(text, parse_special=self.parse_special)
        else:
            system = [] if self.system is None else [{"role": "system", "content": self.system}]
            prompt = self.model.chat_prompt(
                [*system, *history], think=self.think, parse_special=self.parse_special
            )
        return self._stream(prompt, history, params)

    def _stream(
        self, prompt: Prompt, history: Sequence[ChatMessage], params: SamplingParams
    ) -> tuple[Completion, EventStream]:
        completion, events = self.model.stream(prompt, params)
        said = self.model.text_engine.said(prompt)

        def remember() -> None:
            if completion.error is None and not _is_untouched(completion):
                answer = _answer(said.answer + completion.text, said.thinking + completion.thinking)
                self.messages = [*history, answer]
                self._last = (prompt, completion)

        events.on_close.append(remember)
        return completion, events


def _is_untouched(completion: Completion) -> bool:
    """Whether it was interrupted before it said anything: nothing was asked, then."""
    return completion.finish_reason is None and completion.num_generated_tokens == 0


def _answer(text: str, thinking: str) -> ChatMessage:
    """The message of an answer. Its thoughts go beside it, under the two names that templates
    know; a template that feeds earlier thoughts back, or drops them, does as it was written to.
    """
    message: dict[str, Any] = {"role": "assistant", "content": text}
    if thinking:
        message |= {"reasoning_content": thinking, "thinking": thinking}
    return message
