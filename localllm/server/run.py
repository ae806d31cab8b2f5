"""Runs a server: listens, starts the engine, answers, and shuts down in order."""

import asyncio
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import FrameType

import uvicorn

from localllm.attach.addresses import address_of
from localllm.attach.engine_client import EngineClient
from localllm.attach.server_records import OwnServer, recorded
from localllm.errors import RequestError
from localllm.hub.checkpoint import Checkpoint
from localllm.operators.listener import Tell
from localllm.process.ending import ENDS_S
from localllm.process.log_rate import LogRate
from localllm.process.memory import return_large_blocks
from localllm.server.answering import PromptHabits, ServedModel
from localllm.server.app import create_app
from localllm.server.engines import Engines
from localllm.server.guard import Access
from localllm.server.kept_responses import KeptResponses
from localllm.server.limits import LIMITS
from localllm.server.protocol import PatientProtocol
from localllm.server.request_log import RequestLog, logged
from localllm.server.served_name import ServedName
from localllm.text.prompt_writer import PromptWriter

_BACKLOG = 512
# How this machine reaches a server that listens on all of its addresses.
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a server listens, for how long running requests go on once it has to end, and who is
    told: `tell` the address, once it answers; `log` a line for each request, if there is one.
    """

    host: str
    port: int
    grace_s: int
    tell: Callable[[str], None]
    log: Callable[[str], None] | None = None


class _Server(uvicorn.Server):
    ends_program = True

    def allowed_s(self, count: int) -> float:
        """See Patient: running requests have a grace period, but not after a second signal."""
        grace_s = self.config.timeout_graceful_shutdown or 0
        return ENDS_S + grace_s if count == 1 else ENDS_S

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A second signal, of whichever kind, ends the requests that the first one let finish."""
        self.force_exit = self.force_exit or self.should_exit
        super().handle_exit(sig, frame)


def one_engine(found: Checkpoint, tell: Tell) -> EngineClient:
    """An engine in a process of its own. `tell` gets the lines to print while it loads a model."""
    # An absolute path: a relative one could be taken for an alias.
    return EngineClient(
        str(found.folder.resolve()),
        found.engine_config,
        LIMITS.requests,
        logging.getLogger().level,
        name=found.name,
        address=str(address_of(found.folder, found.engine_config)),
        tell=tell,
    )


async def serve_model(
    found: Checkpoint,
    name: ServedName,
    engines: Engines,
    access: Access,
    kept: KeptResponses,
    habits: PromptHabits,
    page_token: str | None,
    where: Listening,
) -> None:
    """Serve a model as `name` until a signal ends the server. `engines`: not started yet.

    Raises: RequestError for an address that cannot be used, LocalLLMError for a model that cannot
    be loaded.
    """
    return_large_blocks()
    level = logging.getLogger().level
    for handler in logging.getLogger().handlers:
        handler.addFilter(LogRate())
    max_connections = LIMITS.connections_here()
    # asyncio logs a warning for each byte sent to a client that has just disconnected.
    logging.getLogger("asyncio").setLevel(max(level, logging.ERROR))
    # Listen before loading the model, which may take long.
    listener = _listen(where.host, where.port)
    log = None if where.log is None else RequestLog(where.log)
    try:
        info = await engines.start()
        writer = PromptWriter(found.tokenizer, info.context)
        served = ServedModel.of(found, name, writer)
        app = create_app(engines, served, access, kept, habits, page_token)
        settings = uvicorn.Config(
            app if log is None else logged(app, log),
            host=where.host,
            port=where.port,
            log_level=max(level, logging.WARNING),
            access_log=False,
            lifespan="off",
            ws="none",
            server_header=False,
            http=partial(PatientProtocol, max_connections=max_connections),  # type: ignore[arg-type]
            # Connections accepted at once: one is counted only some rounds later.
            backlog=min(_BACKLOG, max(1, max_connections // 8)),
            h11_max_incomplete_event_size=LIMITS.header_bytes,
            timeout_graceful_shutdown=where.grace_s,
        )
        server = _Server(settings)
        announced = asyncio.create_task(_announce(server, listener, where.tell))
        host, port = listener.getsockname()[:2]
        try:
            with recorded(OwnServer(_address(_HERE.get(host, host), port), port, os.getpid())):
                await server.serve(sockets=[listener])
        finally:
            announced.cancel()
    finally:
        listener.close()
        await engines.stop()
        if log is not None:
            log.close()


def _listen(host: str, port: int) -> socket.socket:
    """Raises: RequestError for an address that cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        found = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        # What it accepts inherits this. Without it the second token of an answer waits until the
        # client's system says that it has the first one, up to 40 ms.
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return found
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"cannot listen on {host}, port {port}: {error!s:.100}",
            param="port",
            hint="another --port, or 0 for any free one",
        ) from error


async def _announce(
    server: uvicorn.Server, listener: socket.socket, tell: Callable[[str], None]
) -> None:
    """Tell the address once the server listens."""
    while not server.started:
        await asyncio.sleep(0.01)
    listener.listen(_BACKLOG)  # connections that wait to be accepted take no file
    tell(f"{_address(*listener.getsockname()[:2])}/v1")


def _address(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
