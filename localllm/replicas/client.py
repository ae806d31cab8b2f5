"""A front's side of replicas: what `EngineClient` is for one engine.

If a replica ends, its requests of which nothing was sent go to another one; streamed answers that
have begun end with an error.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass, replace
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from localllm.answer.completion import TextEvent
from localllm.attach.engine_client import EngineDownError, QueueFullError, State
from localllm.attach.messages import COMMANDS, REPLIES, Events, ModelInfo, Stats, Submit
from localllm.process.frames import Unpacker
from localllm.process.messages import Failed
from localllm.process.shapes import MessageError
from localllm.replicas.ask import Ask, Report, keys_of
from localllm.schedule.sampling_params import SamplingParams
from localllm.server.engines import AnswerStream, Engines
from localllm.text.prompt import Prompt

logger = logging.getLogger(__name__)

# A request that ends each of its replicas ends no more of them.
_TRIES = 3
# Seconds between looks at all replicas, and of one; looks that may fail in a row.
_LOOK_S, _LOOKS_FOR_S, _AGAIN_S, _MOST_MISSED = 2.0, 10.0, 0.2, 3
# Seconds that a request waits for a replica to take it: one may be starting.
_ROUTED_S = 120.0


@dataclass(slots=True, eq=False)
class ReplicaStream(AnswerStream):
    """The events of a request that may go from replica to replica; closing it ends the request."""

    client: "ReplicasClient"
    ask: Ask
    num_samples: int
    is_whole: bool
    replica: str = ""
    _response: Any = None
    _num_ended: int = 0
    _has_begun: bool = False

    async def __aiter__(self) -> AsyncIterator[TextEvent]:
        try:
            for _ in range(_TRIES):
                try:
                    if self.is_whole:
                        # Not before the end: another replica may begin it again.
                        for event in [event async for event in self._ask()]:
                            yield event
                        return
                    async for event in self._ask():
                        self._has_begun = True
                        yield event
                    return
                except _GoneError:
                    self.client.look_soon()
                    if self._has_begun:
                        break
                logger.warning("asking again: replica %s ended", self.replica or "unknown")
                self.ask = replace(self.ask, avoid=self.ask.avoid | {self.replica})
            what = "the replica ended during the request"
            raise EngineDownError(
                what if self._has_begun else "no replica stays long enough to answer",
                hint="ask again",
            )
        finally:
            self.close()

    async def _ask(self) -> AsyncIterator[TextEvent]:
        """Ask one replica.

        Raises: _GoneError if it ends; EngineDownError if there is none for this model.
        """
        unpacker = Unpacker(REPLIES)
        self._num_ended = 0
        # In a context of its own: within a request of Ray's proxy, all calls have the same number.
        self._response = Context().run(
            lambda: self.client.handle.options(stream=True).answer.remote(self.ask)
        )
        items = aiter(self._response)
        try:
            async with asyncio.timeout(_ROUTED_S):
                self.replica = await anext(items)
            if self.replica not in self.client.replicas:
                self.client.look_soon()
            async for item in items:
                for reply in unpacker.feed(item):
                    if isinstance(reply, Failed):
                        raise reply.error
                    assert isinstance(reply, Events)
                    for _, event in reply.events:
                        self._num_ended += event.finish_reason is not None
                        yield event
        except TimeoutError as error:
            raise EngineDownError("there is no replica of this model", hint="try again") from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise _GoneError from error
        except (
            *(RayError, RayServeException, EngineDownError, MessageError),
            StopAsyncIteration,  # it ended before it told its name
        ) as error:
            logger.debug("replica %s", self.replica, exc_info=True)
            raise _GoneError from error
        if self._num_ended < self.num_samples:
            raise _GoneError

    def close(self) -> None:
        if self._response is not None and self._num_ended < self.num_samples:
            self._response.cancel()
        self.client.forget(self)


class _GoneError(Exception):
    """The replica ended before the answer did."""


class ReplicasClient(Engines):
    """All replicas of a model, as one."""

    def __init__(
        self,
        deploy: Callable[[], DeploymentHandle[Any]],
        model: str,
        max_requests: int,
        end: Callable[[], None] = lambda: None,
    ) -> None:
        """`deploy`: starts the replicas, and waits until they can be asked; `end`: ends them;
        `model`: see Ask.
        """
        self._deploy, self._end = deploy, end
        self._model, self._max_requests = model, max_requests
        self._handle: DeploymentHandle[Any] | None = None
        self._reports: dict[str, Report] = {}
        self._num_missed = 0
        self._streams: set[ReplicaStream] = set()
        self._looking: asyncio.Task[None] | None = None
        self._has_changed = asyncio.Event()

    @property
    def handle(self) -> DeploymentHandle[Any]:
        """Through which replicas are asked."""
        assert self._handle is not None
        return self._handle

    @property
    def replicas(self) -> Mapping[str, Report]:
        return self._reports

    @property
    def state(self) -> State:
        """The best state of a replica."""
        states = {report.state for report in self._reports.values()}
        known: tuple[State, ...] = ("ready", "compiling", "unresponsive")
        return next((state for state in known if state in states), "starting")

    @property
    def stats(self) -> Stats:
        """The load of all replicas together."""
        each = [report.stats for report in self._reports.values()]
        return Stats(
            running=sum(stats.running for stats in each),
            waiting=sum(stats.waiting for stats in each),
            used_blocks=sum(stats.used_blocks for stats in each),
            blocks=max(1, sum(stats.blocks for stats in each)),
            preemptions=sum(stats.preemptions for stats in each),
        )

    @property
    def num_restarts(self) -> int:
        """Engines that ended and were replaced within the replicas that run."""
        return sum(report.num_restarts for report in self._reports.values())

    async def start(self) -> ModelInfo:
        self._handle = await asyncio.to_thread(self._deploy)
        while not self._reports:
            await self._look()
        self._looking = asyncio.create_task(self._watch())
        return next(iter(self._reports.values())).info

    async def stop(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
        for stream in list(self._streams):
            stream.close()
        await asyncio.to_thread(self._end)

    def submit(
        self, prompt: Prompt, params: SamplingParams, salt: bytes = b"", *, is_whole: bool = False
    ) -> ReplicaStream:
        """The request starts once it is read. Raises: QueueFullError."""
        if len(self._streams) >= self._max_requests:
            raise QueueFullError(f"{len(self._streams)} requests are already running or waiting")
        ids = prompt.token_ids
        packed = COMMANDS.pack(Submit(0, prompt, params, salt))
        ask = Ask(self._model, keys_of(ids, salt), len(ids), frozenset(), packed)
        stream = ReplicaStream(self, ask, params.n, is_whole)
        self._streams.add(stream)
        return stream

    def forget(self, stream: ReplicaStream) -> None:
        """Drop a stream that nobody reads any more."""
        self._streams.discard(stream)

    def look_soon(self) -> None:
        """Ask the replicas how they are, since one has come or gone."""
        self._has_changed.set()

    async def _watch(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_S):
                    await self._has_changed.wait()
            self._has_changed.clear()
            await self._look()

    async def _look(self) -> None:
        """Ask all replicas of this model how they are."""
        found: list[Any] = []
        try:
            asked = self.handle.broadcast("report")
            found = await asked.results_async(timeout_s=_LOOKS_FOR_S, return_exceptions=True)
        except TimeoutError:
            self._num_missed += 1  # one that hangs hides the others, but not for ever
            if self._num_missed < _MOST_MISSED:
                return
        except Exception:  # whatever Ray raises, fronts go on looking
            logger.debug("replicas cannot be asked", exc_info=True)
        reports = (each for each in found if isinstance(each, Report))
        self._reports = {each.replica: each for each in reports if each.model == self._model}
        self._num_missed = 0
        if not self._reports:
            await asyncio.sleep(_AGAIN_S)
