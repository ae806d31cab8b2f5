"""`localllm serve`: the engine stays warm, for every client."""

import asyncio
import logging
import signal
import socket
import time
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli import options, suggestions
from localllm.cli.output import note, show_controls
from localllm.errors import RequestError
from localllm.settings import default_model

if TYPE_CHECKING:
    import uvicorn

    from localllm.checkpoint import Checkpoint
    from localllm.server.guard import Access

# Requests in one batch, where nobody says otherwise.
_DEFAULT_SEQS = 16
# For requests under way when the server is told to end.
_DRAIN_S = 30
_HEADER_BYTES = 16 << 10


def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            help="Alias, org/name or folder.", show_default=False, autocompletion=suggestions.models
        ),
    ] = None,
    host: Annotated[str, options.option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, options.option("--port", help="Port to listen on; 0: any.")] = 8000,
    api_key: Annotated[
        list[str] | None, options.option("--api-key", help="Who asks needs it; repeatable.")
    ] = None,
    allowed_host: Annotated[
        list[str] | None,
        options.option("--allowed-host", help="A name that this server is called by; repeatable."),
    ] = None,
    allowed_origin: Annotated[
        list[str] | None,
        options.option("--allowed-origin", help="An origin whose pages may ask; repeatable."),
    ] = None,
    served_model_name: Annotated[
        str | None, options.option("--served-model-name", help="What clients call the model.")
    ] = None,
    ctx: options.Context = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = 0.9,
    reserve: options.Reserve = None,
    max_num_seqs: options.MaxNumSeqs = None,
    max_num_batched_tokens: options.MaxNumBatchedTokens = None,
    no_prefix_cache: options.NoPrefixCache = False,
    cache_disk: options.CacheDisk = None,
    cache_dir: options.CacheDir = None,
    backend: options.Backend = "auto",
    device: options.Device = "auto",
    dtype: options.DTypeName = "auto",
    kv_cache_dtype: options.KVCacheDTypeName = "auto",
    deterministic: options.Deterministic = False,
    spec: options.Spec = options.SPEC,
    spec_max: options.SpecMax = options.SPEC_MAX,
    spec_ngram: options.SpecNgram = options.SPEC_NGRAM,
) -> int:
    """Answer over HTTP, in OpenAI's API, many at once.

    On this machine only, unless --host says otherwise; then a key is needed.
    """
    access = find_access(host, api_key or [], allowed_host or [], allowed_origin or [])
    config = options.EngineFlags(
        ctx,
        gpu_memory_utilization,
        reserve,
        max_num_seqs,
        max_num_batched_tokens,
        no_prefix_cache,
        backend,
        device,
        dtype,
        kv_cache_dtype,
        deterministic,
        options.parse_speculation(spec, spec_max, spec_ngram),
        cache_disk=cache_disk,
        cache_dir=cache_dir,
    ).config(default_max_num_seqs=_DEFAULT_SEQS)
    from localllm.checkpoint import open_checkpoint
    from localllm.cli.download_progress import TerminalProgress

    found = open_checkpoint(model or default_model(), config, TerminalProgress())
    name = served_model_name or found.name
    # Ctrl-C ends the engine too: it is an exception, behind which things are put away.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return asyncio.run(_serve(found, name, access, host, port))


def find_access(host: str, keys: list[str], hosts: list[str], origins: list[str]) -> "Access":
    """Who may ask. Raises: RequestError for an open address without a key."""
    from localllm.server.guard import LOOPBACK_NAMES, Access

    if not all(key.isascii() and key.isprintable() and key.split() == [key] for key in keys):
        raise RequestError(
            "an --api-key must be letters, figures and signs of ASCII, without spaces",
            param="api_key",
        )
    if host not in LOOPBACK_NAMES and not keys:
        raise RequestError(
            f"{host} can be reached by others, and there is no key",
            param="host",
            hint="--api-key KEY, or the default --host 127.0.0.1",
        )
    named = [] if host in ("0.0.0.0", "::") else [host.lower()]
    return Access(keys, (*LOOPBACK_NAMES, *named, *map(str.lower, hosts)), origins)


async def _serve(found: "Checkpoint", name: str, access: "Access", host: str, port: int) -> int:
    import uvicorn

    from localllm.prompt_writer import PromptWriter
    from localllm.server.app import ServedModel, create_app
    from localllm.server.engine_client import EngineClient
    from localllm.server.limits import LIMITS

    level = logging.getLogger().level
    # It has a warning for each byte that is sent to a client who has just gone.
    logging.getLogger("asyncio").setLevel(max(level, logging.ERROR))
    # Before the model is loaded, which may take long. The folder as it is: a relative one could be
    # taken for an alias.
    listener = _listen(host, port)
    folder = str(found.folder.resolve())
    engine = EngineClient(folder, found.engine_config, LIMITS.requests, level)
    try:
        info = await engine.start()
        writer = PromptWriter(found.tokenizer, info.context_length, info.longer_context)
        served = ServedModel(name, int(time.time()), writer, found.defaults)
        settings = uvicorn.Config(
            create_app(engine, served, access),
            host=host,
            port=port,
            log_level=max(level, logging.WARNING),
            access_log=False,
            lifespan="off",
            server_header=False,
            h11_max_incomplete_event_size=_HEADER_BYTES,
            timeout_graceful_shutdown=_DRAIN_S,
        )
        server = uvicorn.Server(settings)
        announced = asyncio.create_task(_announce(server, name))
        try:
            await server.serve(sockets=[listener])
        finally:
            announced.cancel()
    finally:
        listener.close()
        await engine.stop()
    return 0


def _listen(host: str, port: int) -> socket.socket:
    """Raises: RequestError for an address that cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise RequestError(
            f"cannot listen on {host}, port {port}: {error!s:.100}",
            param="port",
            hint="another --port, or 0 for any that is free",
        ) from error


async def _announce(server: "uvicorn.Server", name: str) -> None:
    """Say where it listens, once it does."""
    while not server.started:
        await asyncio.sleep(0.01)
    sockets = [each for listening in server.servers for each in listening.sockets]
    address, port = sockets[0].getsockname()[:2]
    shown = f"[{address}]" if ":" in address else address
    note(f"{show_controls(name)} answers at http://{shown}:{port}/v1; Ctrl-C ends")
