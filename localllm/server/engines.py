"""What a server needs of whatever computes its answers: one engine, or several."""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from localllm.answer.completion import TextEvent
from localllm.attach.engine_client import State
from localllm.attach.messages import ModelInfo, Stats
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.prompt import Prompt


class AnswerStream(Protocol):
    """The events of one request, to be read by one task."""

    @property
    def replica(self) -> str:
        """The one of several engines that answers, empty until that is known."""

    def __aiter__(self) -> AsyncIterator[TextEvent]:
        """Raises: RequestError for a request that is refused; EngineDownError."""

    def close(self) -> None:
        """End the request, if it still runs."""


class Health(Protocol):
    """How an engine is."""

    @property
    def state(self) -> State:
        """Whether it answers."""

    @property
    def stats(self) -> Stats:
        """Its load."""

    @property
    def num_restarts(self) -> int:
        """How often it ended and was replaced."""


class Engines(Health, Protocol):
    """One engine, or several that are one to those who ask."""

    @property
    def replicas(self) -> Mapping[str, Health]:
        """Each of several by its name; empty for one engine."""

    async def start(self) -> ModelInfo:
        """Start, and wait until requests can be answered. Raises: LocalLLMError."""

    async def stop(self) -> None:
        """End all requests with an error, and the engines."""

    def submit(
        self, prompt: Prompt, params: SamplingParams, salt: bytes = b"", *, is_whole: bool = False
    ) -> AnswerStream:
        """Start a request. `is_whole`: nothing is sent before its end, so that another engine may
        answer it again.

        Raises: EngineDownError, QueueFullError.
        """
