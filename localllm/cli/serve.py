"""`localllm serve`: the engine stays warm, for every client."""

import signal
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated

from localllm.cli.common_flags import OptionalModel
from localllm.cli.engine_flags import DraftFlags, EngineFlags, PrefixCacheFlags
from localllm.cli.flags import Flags, option, takes_flags
from localllm.cli.output import note, show_controls
from localllm.errors import RequestError
from localllm.user.settings import default_model

if TYPE_CHECKING:
    from localllm.hub.checkpoint import Checkpoint
    from localllm.server.guard import Access

# Requests in one batch, where nobody says otherwise.
_DEFAULT_SEQS = 16


@dataclass(frozen=True, slots=True)
class ServerFlags(Flags):
    """Where the server listens, and who may ask."""

    host: Annotated[str, option("--host", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, option("--port", help="Port to listen on; 0: any.")] = 8000
    api_key: Annotated[
        list[str] | None,
        option("--api-key", help="Who asks needs it; repeatable.", section="Model and prompt"),
    ] = None
    allowed_host: Annotated[
        list[str] | None,
        option("--allowed-host", help="A name that this server is called by; repeatable."),
    ] = None
    allowed_origin: Annotated[
        list[str] | None,
        option("--allowed-origin", help="An origin whose pages may ask; repeatable."),
    ] = None
    served_model_name: Annotated[
        str | None, option("--served-model-name", help="What clients call the model.")
    ] = None
    grace: Annotated[int, option("--grace", help="Seconds for answers under way at the end.")] = 30

    def access(self) -> "Access":
        """Who may ask. Raises: RequestError for an open address without a key."""
        from localllm.server.guard import LOOPBACK_NAMES, Access

        keys = self.api_key or []
        _check_keys(keys)
        if self.host not in LOOPBACK_NAMES and not keys:
            raise RequestError(
                f"{self.host} can be reached by others, and there is no key",
                param="host",
                hint="--api-key KEY, or the default --host 127.0.0.1",
            )
        named = [] if self.host in ("0.0.0.0", "::") else [self.host.lower()]
        hosts = map(str.lower, self.allowed_host or [])
        return Access(keys, (*LOOPBACK_NAMES, *named, *hosts), self.allowed_origin or [])


def _check_keys(keys: list[str]) -> None:
    if not all(key.isascii() and key.isprintable() and key.split() == [key] for key in keys):
        raise RequestError(
            "an --api-key must be letters, figures and signs of ASCII, without spaces",
            param="api_key",
        )


@takes_flags
def serve(
    model: OptionalModel = None,
    *,
    server: ServerFlags,
    engine: EngineFlags,
    cache: PrefixCacheFlags,
    drafts: DraftFlags,
) -> int:
    """Answer over HTTP, in OpenAI's API, many at once.

    On this machine only, unless --host says otherwise; then a key is needed.
    """
    access = server.access()
    config = engine.config(_DEFAULT_SEQS, drafts.config(), cache)
    from localllm.cli.download_progress import TerminalProgress
    from localllm.hub.checkpoint import open_checkpoint

    found = open_checkpoint(model or default_model(), config, TerminalProgress())
    found.tokenizer.warm()
    _serve(found, server, access)
    return 0


def _serve(found: "Checkpoint", flags: ServerFlags, access: "Access") -> None:
    """Until a signal ends it."""
    import asyncio

    from localllm.server.run import serve_model

    name = flags.served_model_name or found.name
    # Ctrl-C ends the engine too: it is an exception, behind which things are put away.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serving = serve_model(
        found,
        name,
        access,
        (flags.host, flags.port),
        lambda url: note(f"{show_controls(name)} answers at {url}; Ctrl-C ends"),
        partial(note, dim=True),
        max(0, flags.grace),
    )
    asyncio.run(serving)
