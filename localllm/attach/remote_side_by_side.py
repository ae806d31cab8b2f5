"""Asks a server many questions side by side, each in a connection and a thread of its own."""

import threading
from collections import deque

from localllm.answer.side_by_side import Answering, SideBySide
from localllm.attach.remote import RemoteModel
from localllm.errors import BusyError, ExitCode, LocalLLMError, RequestError, TemplateError
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Asked

_LOOK_S = 0.05
# Seconds between attempts while the server says that it is busy.
_PAUSES_S = (1.0, 2.0, 4.0, 8.0, 16.0)


class OnServer(SideBySide):
    """A server that is busy is asked again for half a minute."""

    def __init__(self, model: RemoteModel) -> None:
        self._model = model
        self._news = threading.Event()
        self._is_left = threading.Event()
        # What would end every other question too.
        self._failure: LocalLLMError | None = None

    def begin(self, asked: Asked, params: SamplingParams) -> Answering:
        answering = Answering()
        arguments = (answering, asked, params)
        threading.Thread(target=self._answer, args=arguments, name="question", daemon=True).start()
        return answering

    def advance(self) -> None:
        self._news.wait(_LOOK_S)
        self._news.clear()
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        self._is_left.set()

    def _answer(self, answering: Answering, asked: Asked, params: SamplingParams) -> None:
        try:
            self._ask(answering, asked, params)
        except LocalLLMError as error:
            is_its_own = isinstance(error, (RequestError, TemplateError))
            if is_its_own or error.exit_code is ExitCode.FAILURE:
                answering.error = error
            else:
                self._failure = error
        except Exception as error:  # a bug in localllm ends the run, not this thread alone
            self._failure = LocalLLMError(
                f"internal error ({type(error).__name__}): {error!s:.200}"
            )
        answering.is_over = self._failure is None
        self._news.set()

    def _ask(self, answering: Answering, asked: Asked, params: SamplingParams) -> None:
        for pause_s in (*_PAUSES_S, None):
            try:
                answering.completion, events = self._model.twin().ask(asked, params)
                events.should_stop = self._is_left.is_set
                deque(events, maxlen=0)
                answering.error = answering.completion.error
                return
            except BusyError:
                if pause_s is None or self._is_left.wait(pause_s):
                    raise
