"""`localllm serve`: the engine stays warm, for every client."""

import signal
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from localllm.cli import options, suggestions
from localllm.cli.output import note, show_controls
from localllm.errors import RequestError
from localllm.user.settings import default_model

if TYPE_CHECKING:
    from localllm.server.guard import Access

# Requests in one batch, where nobody says otherwise.
_DEFAULT_SEQS = 16


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
    grace: Annotated[
        int, options.option("--grace", help="Seconds for answers under way at the end.")
    ] = 30,
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
    threads: options.Threads = None,
    self_check: options.SelfCheck = True,
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
        threads=threads,
        self_check=self_check,
    ).config(default_max_num_seqs=_DEFAULT_SEQS)
    import asyncio

    from localllm.cli.download_progress import TerminalProgress
    from localllm.hub.checkpoint import open_checkpoint
    from localllm.server.run import serve_model

    found = open_checkpoint(model or default_model(), config, TerminalProgress())
    found.tokenizer.warm()
    name = served_model_name or found.name
    # Ctrl-C ends the engine too: it is an exception, behind which things are put away.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serving = serve_model(
        found,
        name,
        access,
        (host, port),
        lambda url: note(f"{show_controls(name)} answers at {url}; Ctrl-C ends"),
        partial(note, dim=True),
        max(0, grace),
    )
    asyncio.run(serving)
    return 0


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
