"""The interface between the code that asks and the model that answers, wherever that runs."""

from collections.abc import Sequence
from typing import Any, Protocol

from localllm.answer.completion import Completion
from localllm.answer.event_stream import EventStream
from localllm.schedule.sampling_params import SamplingParams
from localllm.text.context import Context
from localllm.text.prompt import Asked


class Answerer(Protocol):
    """A model that is ready to answer: in this process, in another one, or behind HTTP.

    All work on tokens is on its side: writing prompts, counting, decoding.
    """

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def load_s(self) -> float:
        """Seconds until it was ready."""

    @property
    def context(self) -> Context:
        """How much it reads and writes in one request."""

    @property
    def cached_elsewhere(self) -> str:
        """What else than this process put tokens into the cache; empty if nothing did."""

    @property
    def has_chat_template(self) -> bool:
        """Whether it answers conversations; if not, it completes texts."""

    @property
    def can_think(self) -> bool:
        """Whether its thoughts can be switched on and off."""

    def sampling_params(self, **given: Any) -> SamplingParams:
        """The model's defaults, overridden by `given`.

        Raises: RequestError for a value out of range.
        """

    def ask(
        self, asked: Asked, params: SamplingParams, said: Sequence[int] = ()
    ) -> tuple[Completion, EventStream]:
        """Start one request: returns its growing completion, and the events that make it grow.

        `said`: tokens of an earlier answer to the same question, with which this answer begins.
        Closing the events aborts the request. Raises: RequestError, TemplateError; LocalLLMError if
        an engine or a server is gone.
        """

    def count(self, asked: Asked, limit: int | None = None) -> int:
        """The number of prompt tokens; 0 if only a server can count them.

        A prompt of more than `limit` tokens is not counted to its end: the result is over `limit`,
        but may be too small. Raises: RequestError, TemplateError.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens."""

    def work_ahead(self) -> bool:
        """Do a little work that makes later steps faster; False if nothing is left to do."""

    def close(self) -> None:
        """End all requests, and save the cached prefixes."""
