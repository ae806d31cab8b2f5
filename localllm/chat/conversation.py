"""A conversation: questions and answers, which can be taken back."""

import gc
import traceback
from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import cache

from localllm.answer.answerer import Answerer
from localllm.answer.completion import Completion, Truncation
from localllm.answer.event_stream import EventStream
from localllm.answer.overflow import OverflowPolicy, answer_reserve, with_way_out
from localllm.chat.cache_report import CacheKind, CacheReport, report_cache
from localllm.chat.transcript import SUMMARY_REQUEST, Transcript, Turn
from localllm.errors import ContextLengthError, LocalLLMError, RequestError
from localllm.schedule.request import FinishReason
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Asked, ChatMessage, Conversation, Prompt, Text, ThinkLevel

# Turns at the end of a conversation that a summary leaves as they are.
_KEPT_TURNS = 1


class ChatSession:
    """A system prompt, the turns so far, and the model that answers them.

    Every method that asks returns what `Answerer.ask` does. The answer, as far as it was read,
    joins the turns when its stream ends or is closed, so that an interrupted answer is kept; a
    failed one leaves the turns as they were, and its question in `unanswered`. A question that was
    saved but never answered stays among the turns when another is asked, but no prompt contains it.
    With `raw`, or a model without a chat template, each text is completed by itself.
    """

    def __init__(self, model: Answerer, system: str | None = None, *, raw: bool = False) -> None:
        self._model: Answerer | None = model
        self.system = system
        self.title = ""  # see Transcript
        self.raw = raw
        self.think: ThinkLevel | None = None
        self.parse_special = False
        self.overflow: OverflowPolicy = "error"
        self.turns: list[Turn] = []
        self.unanswered: str | None = None
        self._was_restored = False  # whether `unanswered` was restored
        # Turns that were left out of the last prompt; the next one leaves them out too, so that it
        # still begins with what the cache holds.
        self._num_dropped = 0
        self._last_prompt: Prompt | None = None
        # The newest request and its answer, and the tokens of the one before it.
        self._asked: tuple[list[ChatMessage], Completion] | None = None
        self._earlier: list[int] = []
        self._under_way: Callable[[], list[Turn]] | None = None

    @property
    def model(self) -> Answerer:
        """The model that answers."""
        assert self._model is not None, "between two models"
        return self._model

    @property
    def completes_text(self) -> bool:
        """Whether a text is continued, rather than answered."""
        return self.raw or not self.model.has_chat_template

    @property
    def messages(self) -> list[ChatMessage]:
        """Questions and answers so far."""
        return [message for turn in self.turns for message in turn.messages]

    @property
    def num_turns(self) -> int:
        """Answers so far."""
        return sum(turn.is_answered for turn in self.turns)

    def transcript(self) -> Transcript:
        """The whole conversation, with the answer in progress so far, or the question that has no
        answer.
        """
        turns = self.turns if self._under_way is None else self._under_way()
        is_asked = bool(turns) and turns[-1].question == self.unanswered
        if self.unanswered is not None and (self._under_way is None or not is_asked):
            turns = [*turns, Turn(self.unanswered, self.model.name)]
        return Transcript(self.model.name, self.system, tuple(turns), self.title)

    def pose(self, text: str) -> None:
        """Make `text` the next question, so that it can be saved before `reply` asks it."""
        earlier = self.unanswered
        if self._was_restored and earlier is not None and earlier != text:
            self.turns.append(Turn(earlier, self.model.name))
        self.unanswered, self._was_restored = text, False

    def reply(self, text: str, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Ask `text`. Raises: RequestError, TemplateError."""
        self.pose(text)
        return self._ask(self.turns, text, params)

    def asked_alone(self, question: str) -> Asked:
        """What the model is asked if `question` is the first one."""
        if self.completes_text:
            return Text(question, self.parse_special)
        return self._conversation([], question)

    def regenerate(self, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Answer the last question again; the old answer is kept if this one fails.

        Raises: RequestError if nothing was asked.
        """
        if not self.turns:
            raise RequestError("there is no answer yet", hint="ask something first")
        return self._ask(self.turns[:-1], self.turns[-1].question, params)

    def resume(self, params: SamplingParams) -> tuple[Completion, EventStream]:
        """Continue the last answer, which was interrupted or cut; its KV is still cached, unless it
        is from an earlier session.

        The completion holds the new part only. Raises: RequestError if there is no answer to
        continue.
        """
        if not self.turns:
            raise RequestError("there is no answer to continue", hint="ask something first")
        last, prompt = self.turns[-1], self._last_prompt
        if last.finish_reason is FinishReason.STOP:
            raise RequestError("the answer is complete", hint="ask the next question, or /regen")
        if last.model != self.model.name:
            raise RequestError(
                f"the answer is by {last.model}, not by {self.model.name}",
                hint="/regen, or the model that began the answer",
            )
        asked: Asked = prompt or self._asked_for(self.turns[:-1], last.question, params)[0]
        return self._stream(asked, self.turns[:-1], last.question, params, last.token_ids)

    @property
    def can_be_summarised(self) -> bool:
        """Whether there are turns before those that `summarise` leaves as they are."""
        return len(self.turns) > _KEPT_TURNS

    def summarise(
        self, params: SamplingParams
    ) -> tuple[Completion, EventStream, Callable[[str], None]]:
        """Have all but the last turn summarised, or as many of the oldest as leave room for a
        summary; the third value is a function that replaces them with the summary.

        Raises: RequestError if there is nothing before the last turn; ContextLengthError if the
        oldest turn alone leaves no room.
        """
        older = self.turns[:-_KEPT_TURNS]
        if self.completes_text or not older:
            raise RequestError("there is nothing to summarise yet")
        window = self.model.context.length
        room = window - answer_reserve(window, params.max_tokens)

        def length(num_turns: int) -> int:
            return self.model.count(self._conversation(older[:num_turns], SUMMARY_REQUEST), room)

        count = bisect_left(range(2, len(older) + 1), True, key=lambda n: length(n) > room) + 1
        if count == 1 and (taken := length(1)) > room:
            raise ContextLengthError(
                "the oldest turn leaves no room for a summary",
                where=f"it takes at least {taken:,} tokens of {window:,}",
            )
        asked = self._conversation(older[:count], SUMMARY_REQUEST)
        completion, events = self.model.ask(asked, params)

        def put(summary: str) -> None:
            turn = Turn(SUMMARY_REQUEST, self.model.name, summary, "", FinishReason.STOP)
            self.turns = [turn, *self.turns[count:]]
            self._num_dropped, self._last_prompt = 0, None

        return completion, events, put

    def count_tokens(self) -> int:
        """About how many tokens of the context the conversation takes so far."""
        if self.completes_text or not (self.turns or self.system):
            return 0
        limit = 4 * self.model.context.length
        try:
            return self.model.count(self._conversation(self.turns, ""), limit)
        except LocalLLMError:  # the template refuses this conversation
            text = "".join(turn.question + turn.answer for turn in self.turns)
            return self.model.count(Text(text), limit)

    def report_cache(self) -> CacheReport | None:
        """How much of the newest prompt came from the cache, and why not all; None without one."""
        if self._asked is None:
            return None
        messages, completion = self._asked
        if completion.prompt is None:
            return None
        return report_cache(
            self.model.decode,
            self._earlier,
            completion.prompt.token_ids,
            messages,
            completion.num_cached_tokens,
            CacheKind(self.model.context.keeps_states, self.model.cached_elsewhere),
        )

    def undo(self) -> Turn | None:
        """Take back the last question with its answer, if it has one, and return them; None if
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
        """Continue from other turns. If the last question has no answer, it is `unanswered`."""
        self.turns, self.unanswered, self.title = list(turns), None, ""
        self._num_dropped, self._last_prompt = 0, None
        if self.turns and not self.turns[-1].is_answered:
            self.unanswered = self.turns.pop().question
        self._was_restored = self.unanswered is not None

    def close(self) -> None:
        """Close the model, which saves its cached prefixes."""
        if self._model is not None:
            self._model.close()

    def change_model(self, load: Callable[[], Answerer], load_back: Callable[[], Answerer]) -> None:
        """Continue with another model, which reads the conversation as it is.

        The current model is released first, since there may not be room for two; if the other one
        cannot be loaded, `load_back` brings the first one back. Raises: what `load` raises.
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
            asked, truncation = self._asked_for(history, question, params)
            completion, events = self._stream(asked, history, question, params)
        except ContextLengthError as error:
            room = self.model.context.length - 1  # for one token of an answer
            alone = self._conversation([], question)
            fits_alone = bool(history) and self.model.count(alone, room) <= room
            more = self.model.context.longer
            raise with_way_out(error, more, fits_alone=fits_alone) from error
        completion.truncation = truncation
        return completion, events

    def _asked_for(
        self, history: Sequence[Turn], question: str, params: SamplingParams
    ) -> tuple[Asked, Truncation | None]:
        """What the model is asked: the whole conversation, or, if that is too long and the user
        allows it, as many of the newest turns as fit. Raises: RequestError, TemplateError.
        """
        if self.completes_text:
            return Text(question, self.parse_special), None
        if self.overflow == "error":
            return self._conversation(history, question), None
        window = self.model.context.length
        room = window - answer_reserve(window, params.max_tokens)

        @cache
        def length(num_dropped: int) -> int:
            return self.model.count(self._conversation(history[num_dropped:], question))

        start = min(self._num_dropped, len(history))
        places = range(start, len(history))
        dropped = start + bisect_left(places, True, key=lambda n: length(n) <= room)
        self._num_dropped = dropped
        asked = self._conversation(history[dropped:], question)
        if dropped == 0:
            return asked, None
        return asked, Truncation(dropped, length(0) - length(dropped), self.overflow)

    def _conversation(self, history: Sequence[Turn], question: str) -> Conversation:
        messages = self._messages(history, question)
        return Conversation(messages, think=self.think, parse_special=self.parse_special)

    def _messages(self, history: Sequence[Turn], question: str) -> list[ChatMessage]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        # Templates expect questions and answers to alternate.
        said = [message for turn in history if turn.is_answered for message in turn.messages]
        return [*system, *said, {"role": "user", "content": question}]

    def _stream(
        self,
        asked: Asked,
        history: Sequence[Turn],
        question: str,
        params: SamplingParams,
        said_ids: Sequence[int] = (),
    ) -> tuple[Completion, EventStream]:
        completion, events = self.model.ask(asked, params, said_ids)
        earlier = self._asked[1] if self._asked is not None else None
        if earlier is not None and earlier.prompt is not None:
            # The newest token of an answer has no keys and values yet.
            answered = [token.token_id for token in earlier.samples[0].tokens[:-1]]
            self._earlier = [*earlier.prompt.token_ids, *answered]
        self._asked = (self._messages(history, question), completion)
        said, model = completion.said, self.model.name

        def turns_so_far() -> list[Turn]:
            new = tuple(token.token_id for token in completion.samples[0].tokens)
            turn = Turn(
                question,
                model,
                said.answer + completion.text,
                said.thinking + completion.thinking,
                completion.finish_reason,
                (*said_ids, *new),
            )
            return [*history, turn]

        def remember() -> None:
            self._under_way = None
            if completion.error is None and not _is_untouched(completion):
                self.turns = turns_so_far()
                self._last_prompt = completion.prompt
                if self.unanswered == question:
                    self.unanswered = None

        # The answer that this one replaces stays until this one has ended.
        replaces = len(self.turns) > len(history) and not said_ids
        self._under_way = None if replaces else turns_so_far
        events.on_close.append(remember)
        return completion, events


def _let_go(error: BaseException | None) -> None:
    """Release what the stack frames of an error hold, which may be half a model."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def _is_untouched(completion: Completion) -> bool:
    """Whether the answer was interrupted before its first token: then nothing counts as asked."""
    return completion.finish_reason is None and completion.num_generated_tokens == 0
