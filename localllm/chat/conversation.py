"""A conversation: turns that grow by questions and answers, and can be taken back."""

import gc
import traceback
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace

from localllm.answer.completion import Completion, Truncation
from localllm.answer.loaded_model import LoadedModel
from localllm.answer.overflow import OverflowPolicy, answer_reserve, with_way_out
from localllm.answer.text_engine import EventStream
from localllm.chat.cache_report import CacheReport, report_cache
from localllm.chat.transcript import SUMMARY_REQUEST, Transcript, Turn
from localllm.engine.request import FinishReason
from localllm.engine.sampling_params import SamplingParams
from localllm.errors import ContextLengthError, LocalLLMError, RequestError
from localllm.text.prompt import ChatMessage, Prompt, ThinkLevel

# Turns at the end of a conversation that a summary leaves as they are.
_KEPT_TURNS = 1


class ChatSession:
    """A system prompt, the turns so far, and the model that answers them.

    Every method that asks returns what `LoadedModel.stream` does. The answer joins the turns when
    its stream ends or is closed, as far as it was read, so that an interrupted one is kept; one
    that failed leaves the turns as they were, and its question in `unanswered`. A question that was
    saved and never answered stays among the turns when another is asked, but no prompt holds it.
    `raw`, and a model without a chat template, complete each text by itself.
    """

    def __init__(self, model: LoadedModel, system: str | None = None, *, raw: bool = False) -> None:
        self._model: LoadedModel | None = model
        self.system = system
        self.raw = raw
        self.think: ThinkLevel | None = None
        self.parse_special = False
        self.overflow: OverflowPolicy = "error"
        self.turns: list[Turn] = []
        self.unanswered: str | None = None
        self._was_restored = False  # what is unanswered
        # Turns that were left out of the last prompt; the next one begins behind them too, so that
        # what the cache holds is still its beginning.
        self._num_dropped = 0
        self._last_prompt: Prompt | None = None
        # What the newest request read, and the tokens of the one before it.
        self._asked: tuple[list[ChatMessage], Prompt, Completion] | None = None
        self._earlier: list[int] = []
        self._under_way: Callable[[], list[Turn]] | None = None

    @property
    def model(self) -> LoadedModel:
        """Who answers."""
        assert self._model is not None, "between two models"
        return self._model

    @property
    def completes_text(self) -> bool:
        """Whether a text is continued, rather than answered."""
        return self.raw or not self.model.tokenizer.has_chat_template

    @property
    def messages(self) -> list[ChatMessage]:
        """Questions and answers so far."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    def num_turns(self) -> int:
        """Answers so far."""
        return sum(turn.is_answered for turn in self.turns)

    def transcript(self) -> Transcript:
        """All of it, with the answer that is being said now as far as it is, or the question that
        got none.
        """
        turns = self.turns if self._under_way is None else self._under_way()
        is_asked = bool(turns) and turns[-1].question == self.unanswered
        if self.unanswered is not None and (self._under_way is None or not is_asked):
            turns = [*turns, Turn(self.unanswered, self.model.name)]
        return Transcript(self.model.name, self.system, tuple(turns))

    def pose(self, text: str) -> None:
        """Take `text` for the next question, which can be saved before `reply` asks it."""
        earlier = self.unanswered
        if self._was_restored and earlier is not None and earlier != text:
            self.turns.append(Turn(earlier, self.model.name))
        self.unanswered, self._was_restored = text, False

    def reply(self, text: str, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Ask `text`. Raises: RequestError, TemplateError."""
        self.pose(text)
        return self._ask(self.turns, text, params)

    def regenerate(self, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Answer the last question anew; the old answer is kept if this one fails.

        Raises: RequestError where nothing was asked.
        """
        if not self.turns:
            raise RequestError("there is no answer yet", hint="ask something first")
        return self._ask(self.turns[:-1], self.turns[-1].question, params)

    def resume(self, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Go on with the last answer, which was interrupted or cut; its KV is still cached, unless
        it is of an earlier day.

        The completion holds what is new. Raises: RequestError where there is nothing to go on with.
        """
        if not self.turns:
            raise RequestError("there is no answer to go on with", hint="ask something first")
        last, prompt = self.turns[-1], self._last_prompt
        if last.finish_reason is FinishReason.STOP:
            raise RequestError("the answer is complete", hint="ask the next question, or /regen")
        if last.model != self.model.name:
            raise RequestError(
                f"the answer is {last.model}'s, not {self.model.name}'s",
                hint="/regen, or the model that began it",
            )
        if prompt is None:
            prompt, _ = self._prompt(self.turns[:-1], last.question, params)
        asked = prompt.token_ids[: len(prompt.token_ids) - prompt.num_said]
        open_prompt = replace(
            prompt, token_ids=[*asked, *last.token_ids], num_said=len(last.token_ids)
        )
        return self._stream(open_prompt, self.turns[:-1], last.question, params)

    @property
    def can_be_summarised(self) -> bool:
        """Whether there are turns before those that `summarise` leaves as they are."""
        return len(self.turns) > _KEPT_TURNS

    def summarise(
        self, params: SamplingParams
    ) -> tuple[Completion, EventStream, Callable[[str], None]]:
        """Have all but the last turn summarised, or as many of the oldest as leave room for a
        summary; the third value, called with the summary, puts it in their place.

        Raises: RequestError where there is nothing before the last turn; ContextLengthError where
        the oldest turn alone leaves no room.
        """
        older = self.turns[:-_KEPT_TURNS]
        if self.completes_text or not older:
            raise RequestError("there is nothing to summarise yet")
        window = self.model.context_length
        room = window - answer_reserve(window, params.max_tokens)

        def is_too_long(num_turns: int) -> bool:
            return not self._fits(older[:num_turns], SUMMARY_REQUEST, room)

        count = bisect_left(range(2, len(older) + 1), True, key=is_too_long) + 1
        prompt = self._chat_prompt(older[:count], SUMMARY_REQUEST)
        if len(prompt.token_ids) > room:
            raise ContextLengthError(
                "the oldest turn leaves no room for a summary",
                where=f"it takes {len(prompt.token_ids):,} tokens of {window:,}",
            )
        completion, events = self.model.stream(prompt, params)

        def put(summary: str) -> None:
            turn = Turn(SUMMARY_REQUEST, self.model.name, summary, "", FinishReason.STOP)
            self.turns = [turn, *self.turns[count:]]
            self._num_dropped, self._last_prompt = 0, None

        return completion, events, put

    def count_tokens(self) -> int:
        """Tokens that the conversation so far takes of the context, about."""
        if self.completes_text or not (self.turns or self.system):
            return 0
        try:
            return len(self._chat_prompt(self.turns, "").token_ids)
        except LocalLLMError:  # far too long, or not to this template's liking
            text = "".join(turn.question + turn.answer for turn in self.turns)
            return self.model.tokenizer.count_at_least(text, 4 * self.model.context_length)

    def report_cache(self) -> CacheReport | None:
        """What of the newest prompt came from the cache, and why not all; None without one."""
        if self._asked is None:
            return None
        messages, prompt, completion = self._asked
        if not prompt.token_ids:  # they are known elsewhere
            return None
        return report_cache(
            self.model.tokenizer,
            self._earlier,
            prompt.token_ids,
            messages,
            completion.num_cached_tokens,
        )

    def undo(self) -> Turn | None:
        """Take back the last question with its answer, if it has one, and return them; None where
        nothing was asked.
        """
        if self.unanswered is not None:
            question, self.unanswered = self.unanswered, None
            return Turn(question, self.model.name)
        if not self.turns:
            return None
        *self.turns, last = self.turns
        self._last_prompt = None
        return last

    def clear(self) -> None:
        """Forget all turns; the system prompt stays."""
        self.restore([])

    def restore(self, turns: Sequence[Turn]) -> None:
        """Go on from other turns. A last question without any answer is left unanswered."""
        self.turns, self.unanswered = list(turns), None
        self._num_dropped, self._last_prompt = 0, None
        if self.turns and not self.turns[-1].is_answered:
            self.unanswered = self.turns.pop().question
        self._was_restored = self.unanswered is not None

    def close(self) -> None:
        """Save what its model keeps of prompts."""
        if self._model is not None:
            self._model.close()

    def change_model(
        self, load: Callable[[], LoadedModel], load_back: Callable[[], LoadedModel]
    ) -> None:
        """Go on with another model, which reads the conversation as it is.

        The one so far is let go first, since there may not be room for two; where the other one
        cannot be loaded, `load_back` brings it back. Raises: what `load` does.
        """
        self.close()
        self._model, self._last_prompt, self._num_dropped = None, None, 0
        self._asked, self._earlier = None, []
        gc.collect()  # an engine's parts refer to each other
        failure: BaseException | None = None
        try:
            self._model = load()
        except BaseException as error:
            failure = error
        if failure is not None:
            _let_go(failure)
            self._model = load_back()
            raise failure

    def _ask(
        self, history: Sequence[Turn], question: str, params: SamplingParams
    ) -> tuple[Completion, EventStream]:
        try:
            prompt, truncation = self._prompt(history, question, params)
            completion, events = self._stream(prompt, history, question, params)
        except ContextLengthError as error:
            room = self.model.context_length - 1  # for one token of an answer
            fits_alone = bool(history) and self._fits([], question, room)
            more = self.model.text_engine.way_to_longer_context
            raise with_way_out(error, more, fits_alone=fits_alone) from error
        completion.truncation = truncation
        return completion, events

    def _prompt(
        self, history: Sequence[Turn], question: str, params: SamplingParams
    ) -> tuple[Prompt, Truncation | None]:
        """What the model reads: all of it, or, where that is too long and the user wants it so, as
        many of the newest turns as fit. Raises: RequestError, TemplateError.
        """
        if self.completes_text:
            return self.model.prompts.text(question, parse_special=self.parse_special), None
        if self.overflow == "error":
            return self._chat_prompt(history, question), None
        window = self.model.context_length
        room = window - answer_reserve(window, params.max_tokens)
        whole = len(self._chat_prompt(history, question).token_ids)

        def fits(num_dropped: int) -> bool:
            return len(self._chat_prompt(history[num_dropped:], question).token_ids) <= room

        start = min(self._num_dropped, len(history))
        dropped = start + bisect_left(range(start, len(history)), True, key=fits)
        prompt, self._num_dropped = self._chat_prompt(history[dropped:], question), dropped
        if dropped == 0:
            return prompt, None
        return prompt, Truncation(dropped, whole - len(prompt.token_ids), self.overflow)

    def _fits(self, history: Sequence[Turn], question: str, room: int) -> bool:
        try:
            return len(self._chat_prompt(history, question).token_ids) <= room
        except ContextLengthError:
            return False

    def _chat_prompt(self, history: Sequence[Turn], question: str) -> Prompt:
        messages = self._messages(history, question)
        if self.overflow == "error":
            return self.model.prompts.chat(
                messages, think=self.think, parse_special=self.parse_special
            )
        # However long it is, since it becomes shorter.
        return self.model.tokenizer.encode_chat(
            messages, think=self.think, parse_special=self.parse_special
        )

    def _messages(self, history: Sequence[Turn], question: str) -> list[ChatMessage]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        # A template wants questions and answers to take turns.
        said = [message for turn in history if turn.is_answered for message in turn.messages]
        return [*system, *said, {"role": "user", "content": question}]

    def _stream(
        self, prompt: Prompt, history: Sequence[Turn], question: str, params: SamplingParams
    ) -> tuple[Completion, EventStream]:
        completion, events = self.model.stream(prompt, params)
        if self._asked is not None:
            _, earlier, answer = self._asked
            # The newest token of an answer has no keys and values yet.
            said_ids = [token.token_id for token in answer.samples[0].tokens[:-1]]
            self._earlier = [*earlier.token_ids, *said_ids]
        self._asked = (self._messages(history, question), prompt, completion)
        said, model = self.model.text_engine.said(prompt), self.model.name

        def turns_so_far() -> list[Turn]:
            new = tuple(token.token_id for token in completion.samples[0].tokens)
            turn = Turn(
                question,
                model,
                said.answer + completion.text,
                said.thinking + completion.thinking,
                completion.finish_reason,
                (*prompt.said, *new),
            )
            return [*history, turn]

        def remember() -> None:
            self._under_way = None
            if completion.error is None and not _is_untouched(completion):
                self.turns = turns_so_far()
                self._last_prompt = prompt
                if self.unanswered == question:
                    self.unanswered = None

        # The answer that this one takes the place of stays until this one has ended.
        replaces = len(self.turns) > len(history) and not prompt.said
        self._under_way = None if replaces else turns_so_far
        events.on_close.append(remember)
        return completion, events


def _let_go(error: BaseException | None) -> None:
    """Of what the calls that an error came through hold: half a model, it may be."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def _is_untouched(completion: Completion) -> bool:
    """Whether it was interrupted before it said anything: nothing was asked, then."""
    return completion.finish_reason is None and completion.num_generated_tokens == 0
