"""A replica: an engine in a process of its own, as with one server, held by an actor of Ray."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

from ray import serve

from localllm.attach.engine_client import EngineClient, EngineDownError, RequestStream
from localllm.attach.messages import COMMANDS, REPLIES, Events, Reply, Submit
from localllm.engine.config import EngineConfig
from localllm.errors import LocalLLMError
from localllm.hub.checkpoint import open_checkpoint
from localllm.process.frames import Unpacker
from localllm.process.messages import Failed
from localllm.replicas.ask import Ask, Report

logger = logging.getLogger(__name__)


class Replica:
    """Answers requests by its engine. Ray calls its methods, all in one loop."""

    # Ray waits for it.
    async def __init__(  # type: ignore[misc]
        self, model: str, config: EngineConfig, most_requests: int, told: str
    ) -> None:
        """`model`: a name or a folder on this machine; `told`: what fronts call the model and its
        settings, see Ask.
        """
        self._told = told
        self._name = serve.get_replica_context().replica_id.unique_id
        found = await asyncio.to_thread(open_checkpoint, model, config)
        self._engine = EngineClient(
            str(found.folder.resolve()),
            found.engine_config,
            most_requests,
            logging.getLogger().level,
            name=found.name,
            tell=lambda line: logger.info("replica %s: %s", self._name, line),
        )
        await self._engine.start()

    async def answer(self, ask: Ask) -> AsyncIterator[str | bytes]:
        """The replica's name, and then replies of the engine, packed: as many events at a time as
        have come since the last ones.

        Raises: EngineDownError.
        """
        yield self._name
        [command] = Unpacker(COMMANDS).feed(ask.submit)
        assert isinstance(command, Submit)
        stream = self._engine.submit(command.prompt, command.params, command.salt)
        try:
            async for reply in _replies(stream):
                yield REPLIES.pack(reply)
        finally:
            stream.close()

    async def report(self) -> Report:
        """How the engine is."""
        engine = self._engine
        assert engine.info is not None
        return Report(
            self._name,
            self._told,
            engine.state,
            engine.stats,
            engine.num_restarts,
            engine.info,
        )

    def record_routing_stats(self) -> dict[str, Any]:
        """For the routers, from time to time."""
        return {"requests": self._engine.stats.running + self._engine.stats.waiting}

    def record_replica_metadata(self) -> dict[str, Any]:
        """For the routers, once."""
        return {"model": self._told}

    async def check_health(self) -> None:
        """Raises: LocalLLMError for an engine that will not come back; Ray then replaces it."""
        if self._engine.state in ("failed", "stopped"):
            raise self._engine.failure or LocalLLMError("the engine has stopped")

    async def __del__(self) -> None:
        await self._engine.stop()


async def _replies(stream: RequestStream) -> AsyncIterator[Reply]:
    """The events of a stream, and the error that ends it, if there is one.

    Raises: EngineDownError.
    """
    while stream.num_ended < stream.num_samples:
        found = [await stream.events.get()]
        while not stream.events.empty():
            found.append(stream.events.get_nowait())
        events = [each for each in found if not isinstance(each, LocalLLMError)]
        stream.num_ended += sum(each.finish_reason is not None for each in events)
        if events:
            yield Events(tuple((0, each) for each in events))
        for each in found:
            if isinstance(each, EngineDownError):
                raise each  # the front may ask another replica
            if isinstance(each, LocalLLMError):
                yield Failed(each)
                return
