"""Answers any number of questions side by side, in one engine."""

from dataclasses import dataclass
from typing import Protocol

from localllm.answer.answerer import Answerer
from localllm.answer.completion import Completion
from localllm.answer.event_stream import EventStream
from localllm.errors import LocalLLMError, RequestError, TemplateError
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Asked


@dataclass(slots=True, eq=False)
class Answering:
    """A question that is being answered; once `is_over`, with a whole completion or an error."""

    completion: Completion | None = None
    error: LocalLLMError | None = None
    is_over: bool = False


class SideBySide(Protocol):
    """Answers questions that were begun, whatever becomes of the others."""

    def begin(self, asked: Asked, params: SamplingParams) -> Answering:
        """Begin to answer a question. Raises: LocalLLMError if an engine or a server is gone."""

    def advance(self) -> None:
        """Do a step of all answers, or wait briefly for one. Raises: as `begin`."""

    def close(self) -> None:
        """Abort what is not answered."""


class InOneEngine(SideBySide):
    """In the continuous batch of one engine, here or in another process."""

    def __init__(self, model: Answerer) -> None:
        self._model = model
        self._open: dict[Answering, EventStream] = {}

    def begin(self, asked: Asked, params: SamplingParams) -> Answering:
        answering = Answering()
        try:
            answering.completion, self._open[answering] = self._model.ask(asked, params)
        except (RequestError, TemplateError) as error:
            answering.error, answering.is_over = error, True
        return answering

    def advance(self) -> None:
        for events in self._open.values():
            events.advance()  # one drives all
            break
        for answering, events in list(self._open.items()):
            if events.book():
                del self._open[answering]
                assert answering.completion is not None
                answering.error, answering.is_over = answering.completion.error, True

    def close(self) -> None:
        for events in self._open.values():
            events.close()
        self._open.clear()
