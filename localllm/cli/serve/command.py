"""`localllm serve`: keep one engine running for many HTTP clients."""

import secrets
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from localllm.cli.draw.output import is_terminal, note, show_controls
from localllm.cli.flags.common import OptionalModel
from localllm.cli.flags.engine_flags import DraftFlags, EngineFlags, PrefixCacheFlags
from localllm.cli.flags.groups import Flags, setting, takes_flags
from localllm.cli.flags.values import parse_size
from localllm.errors import RequestError
from localllm.files.regular_file import read_regular
from localllm.replicas.scale import Scale, prepare_ray, require_ray
from localllm.user.settings import default_model

if TYPE_CHECKING:
    from localllm.hub.checkpoint import Checkpoint
    from localllm.server.engines import Engines
    from localllm.server.guard import Access

_KEY_FILE_BYTES = 1 << 20
# Default number of requests in a batch.
_DEFAULT_SEQS = 16


@dataclass(frozen=True, slots=True)
class ServerFlags(Flags):
    """Where the server listens, and who may use it."""

    host: str = setting("127.0.0.1", help="Address to listen on.")
    port: int = setting(8000, help="Port to listen on; 0: any.")
    api_key: list[str] | None = setting(
        help="A key that clients must send; repeatable. All users can see it in ps.",
        section="Model and prompt",
    )
    api_key_file: Path | None = setting(
        help="A file with such keys, one on each line.", section="Model and prompt"
    )
    allowed_host: list[str] | None = setting(help="A host name that clients may use; repeatable.")
    allowed_origin: list[str] | None = setting(
        help="An origin whose pages may send requests; repeatable."
    )
    served_model_name: str | None = setting(help="What clients call the model.")
    any_model_name: bool = setting(False, help="Answer whatever model clients ask for.")
    quiet: bool = setting(False, help="Print no line for each request.")
    replicas: str = setting(
        "1",
        help="Engines behind this address, or fewest and most of them; needs localllm[ray].",
        metavar="N|MIN:MAX",
    )
    volatile: list[str] | None = setting(
        help="Lines of system prompts to move behind the conversation; repeatable.", metavar="REGEX"
    )
    open: bool = setting(
        False, help="Open the page in a browser, with a token for its conversations."
    )
    embeddings: bool = setting(
        False, help="Make embeddings too; models that are made for it do anyway."
    )
    pin: bool = setting(False, help="Keep system prompts in the cache for longer than the rest.")
    keep_responses: str = setting(
        "256MiB", help="Disk for answers that later requests go on from; 0: none.", metavar="SIZE"
    )
    grace: int = setting(30, help="Seconds that running answers get at shutdown.")

    def access(self) -> "Access":
        """Who may use the server. Raises: RequestError for an open address without a key."""
        from localllm.server.guard import LOOPBACK_NAMES, Access

        keys = [*(self.api_key or []), *_keys_in(self.api_key_file)]
        _check_keys(keys)
        if self.host not in LOOPBACK_NAMES and not keys:
            raise RequestError(
                f"{self.host} is open to other machines, and there is no key",
                param="host",
                hint="--api-key-file FILE, or the default --host 127.0.0.1",
            )
        named = [] if self.host in ("0.0.0.0", "::") else [self.host.lower()]
        hosts = map(str.lower, self.allowed_host or [])
        return Access(keys, (*LOOPBACK_NAMES, *named, *hosts), self.allowed_origin or [])


def _keys_in(path: Path | None) -> list[str]:
    """The lines of a file of keys. Raises: RequestError."""
    if path is None:
        return []
    try:
        lines = read_regular(path, _KEY_FILE_BYTES).decode("ascii", "surrogateescape").splitlines()
    except OSError as error:
        raise RequestError(
            f"the file of keys cannot be read: {error.strerror}",
            where=str(path),
            param="api_key_file",
        ) from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise RequestError("the file of keys has none", where=str(path), param="api_key_file")
    return keys


def _check_keys(keys: list[str]) -> None:
    if not all(key.isascii() and key.isprintable() and key.split() == [key] for key in keys):
        raise RequestError(
            "a key must be printable ASCII without spaces",
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
    """Serve a model over HTTP with OpenAI's API, to many clients at once.

    Listens on this machine only, unless --host says otherwise; then a key is required.
    """
    access = server.access()
    scale = Scale.parse(server.replicas)
    if not scale.is_one:
        require_ray()
    config = engine.config(_DEFAULT_SEQS, drafts.config(), cache)
    from localllm.cli.models.download_progress import TerminalProgress
    from localllm.hub.checkpoint import open_checkpoint
    from localllm.hub.embedding_files import is_for_embeddings

    found = open_checkpoint(model or default_model(), config, TerminalProgress())
    if server.embeddings or found.reranker or is_for_embeddings(found.folder):
        found = replace(found, engine_config=replace(found.engine_config, pools=True))
    found.tokenizer.warm()
    _serve(found, server, access, scale)
    return 0


def _serve(found: "Checkpoint", flags: ServerFlags, access: "Access", scale: Scale) -> None:
    """Serve until a signal ends it."""
    import asyncio

    from localllm.server.answering import PromptHabits
    from localllm.server.kept_responses import responses_here
    from localllm.server.run import Listening, serve_model
    from localllm.server.served_name import ServedName, name_for_clients
    from localllm.server.volatile_lines import parse_rule

    name = flags.served_model_name or name_for_clients(found.name, found.folder)
    token = secrets.token_urlsafe(24) if flags.open else None

    opened = ExitStack()

    def tell(url: str) -> None:
        note(f"{show_controls(name)} answers at {url}; Ctrl-C stops it")
        if token is not None:
            _open_page(f"{url.removesuffix('/v1')}/#token={token}", opened)

    # Ctrl-C raises an exception, so that cleanup runs and the engine ends too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    serving = serve_model(
        found,
        ServedName(name, flags.any_model_name),
        _engines(found, scale, max(0, flags.grace)),
        access,
        responses_here(parse_size(flags.keep_responses, "keep-responses")),
        PromptHabits(
            [parse_rule(text) for text in flags.volatile or []],
            pins=flags.pin,
        ),
        token,
        Listening(
            flags.host,
            flags.port,
            max(0, flags.grace),
            tell,
            None if flags.quiet else partial(note, dim=True),
        ),
    )
    with opened:
        asyncio.run(serving)


def _open_page(address: str, opened: ExitStack) -> None:
    """Open it in a browser, if there is one, and tell it in any case; what is opened is a file that
    `opened` removes. `address` has a token, which no command line or log may hold.
    """
    import threading
    import webbrowser

    from localllm.cli.serve.page_file import page_file

    try:
        file = opened.enter_context(page_file(address)).as_uri()
    except OSError as error:
        note(f"the page is not opened, since there is no private folder: {error}")
        file = None
    shown = address if is_terminal(sys.stderr) else file
    if shown is not None:
        note(f"its page, with your conversations: {shown}")
    if file is not None:
        # Some browsers do not return before they end.
        threading.Thread(target=webbrowser.open, args=(file,), daemon=True).start()


def _engines(found: "Checkpoint", scale: Scale, grace_s: int) -> "Engines":
    """What computes the answers, not started yet. Raises: BackendError for too few GPUs."""
    from localllm.server.limits import LIMITS
    from localllm.server.run import one_engine

    if scale.is_one:
        return one_engine(found, partial(note, dim=True))
    prepare_ray()
    from localllm.replicas.here import replicas_here

    note(f"starting {scale} replicas", dim=True)
    return replicas_here(found, scale, LIMITS.requests, grace_s)
