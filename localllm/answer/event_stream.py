"""Iterates over the events of one request."""

from collections.abc import Callable
from typing import Protocol

from localllm.answer.completion import TextEvent
from localllm.schedule.prompt_progress import PromptProgress


class EventSource(Protocol):
    """Where the events of requests come from."""

    def take(self, request_id: int) -> TextEvent | None:
        """The next event of a request, if one has come."""

    def forget(self, request_id: int) -> None:
        """Abort a request if it still runs, and drop its unread events."""

    def is_open(self, request_id: int) -> bool:
        """Whether more events of a request will come."""

    def prompt_progress(self, request_id: int) -> PromptProgress | None:
        """How far the prompt of a request is; None once it has ended, or if that is unknown."""
        return None

    def step(self) -> None:
        """Do a step, or wait for one, so that events come."""


class EventStream:
    """Iterates over one request's events; each `next` drives the source until there is one.

    Closing it, or dropping it, aborts the request and calls everything in `on_close`, once.
    `should_stop` is called between steps, so that a long prompt can be stopped too.
    """

    def __init__(self, source: EventSource, request_id: int) -> None:
        self._source, self.request_id = source, request_id
        self._is_closed = False
        self.on_event: list[Callable[[TextEvent], None]] = []
        self.on_close: list[Callable[[], None]] = []
        self.should_stop: Callable[[], bool] = lambda: False

    def __iter__(self) -> "EventStream":
        return self

    def __next__(self) -> TextEvent:
        while not self._is_closed:
            event = self._source.take(self.request_id)
            if event is not None:
                for book in self.on_event:
                    book(event)
                return event
            if self.should_stop() or not self._source.is_open(self.request_id):
                self.close()
            else:
                self._source.step()
        raise StopIteration

    def advance(self) -> None:
        """Let the source do a step, which drives all its requests."""
        self._source.step()

    def book(self) -> bool:
        """Read the events that have come, without a step; returns whether the request is over."""
        while not self._is_closed and (event := self._source.take(self.request_id)) is not None:
            for add in self.on_event:
                add(event)
        if not self._is_closed and not self._source.is_open(self.request_id):
            self.close()
        return self._is_closed

    def prompt_progress(self) -> PromptProgress | None:
        """How far the prompt is; None once the request has ended."""
        return None if self._is_closed else self._source.prompt_progress(self.request_id)

    def close(self) -> None:
        """Abort the request if it still runs."""
        if not self._is_closed:
            self._is_closed = True
            self._source.forget(self.request_id)
            for call in self.on_close:
                call()

    def __del__(self) -> None:
        self.close()
