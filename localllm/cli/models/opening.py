"""Open the model for `chat`: attach to a running engine, or load it."""

import logging
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.cli.draw.output import note, show_controls
from localllm.cli.draw.status_line import StatusLine
from localllm.cli.models.first_start import welcome
from localllm.engine.config import EngineConfig
from localllm.engine.host_memory import available_bytes
from localllm.hub.recommendation import has_gpu_driver
from localllm.model.weight_files import find_weight_files
from localllm.operators.listener import MEMORY, Listener, Tell
from localllm.user.places import cache_folder

if TYPE_CHECKING:
    from localllm.answer.loaded_model import LoadedModel
    from localllm.attach.started_process import StartedProcess
    from localllm.hub.checkpoint import FoundModel

logger = logging.getLogger(__name__)

# A shorter load shows nothing.
LOADING_SHOWN_S = 1.0
# How long an engine waits for the next question, unless another time was asked for or loading the
# model took less than these seconds.
KEEPALIVE_S, _LONG_LOAD_S = 300.0, 1.0
# What a process takes besides its model's weights, with a context of some size.
_BESIDES_BYTES = 1 << 30
# Requests at a time of an engine that is kept.
KEPT_AT_ONCE = 16
# Unix sockets, by which running engines are found.
_HAS_SOCKETS = os.name == "posix"


def open_noted(
    name: str | None,
    engine: EngineConfig,
    *,
    is_conversation: bool,
    keepalive_s: float | None = None,
) -> "LoadedModel":
    """Open the model; a note on stderr says if none was named, with a single question only the
    first time. How memory is divided is logged.

    `keepalive_s`: how long its engine waits for the next question, in a process of its own; None:
    the default, 0: not at all, negative: forever. Engines that wait give way to a model that needs
    their memory.
    """
    with _started_ahead(keepalive_s) as process:
        return _open(name, engine, is_conversation, keepalive_s, process)


def _open(
    name: str | None,
    engine: EngineConfig,
    is_conversation: bool,
    keepalive_s: float | None,
    process: "StartedProcess | None",
) -> "LoadedModel":
    # Here, when the engine's process imports too.
    from localllm.cli.models.download_progress import TerminalProgress
    from localllm.cli.models.variants import choose_variant
    from localllm.hub.checkpoint import find_model, read_checkpoint

    if name is None:
        welcome(engine, is_once=not is_conversation)
    chosen = choose_variant(name, engine)
    found = find_model(chosen, engine, TerminalProgress())
    attached = _attach(found, keepalive_s) if _HAS_SOCKETS else None
    if attached is not None:
        if is_conversation:
            note(f"{found.name} is already loaded: localllm ps shows where", dim=True)
        return attached
    if _HAS_SOCKETS:
        _make_way(found)
    doing: list[str] = []
    with loading(found.name, doing) as line:

        def tell(text: str) -> None:
            line.say(lambda: note(text, dim=True))

        lines = without_memory(tell) if is_conversation else logger.info
        listener = Listener(lines, doing.append)

        if keepalive_s != 0 and _HAS_SOCKETS:
            from localllm.attach.addresses import address_of
            from localllm.attach.attached import start
            from localllm.attach.kept import end_others

            try:
                loaded = start(
                    _for_several(found),
                    KEEPALIVE_S if keepalive_s is None else keepalive_s,
                    logging.getLogger().level,
                    listener,
                    _LONG_LOAD_S if keepalive_s is None else 0.0,
                    process,
                )
            except OSError as error:
                tell(f"the engine cannot be kept running ({error})")
                if process is not None:
                    process.end()
            else:
                end_others(found.name, address_of(found.folder, found.engine_config))
                if keepalive_s is None:
                    _tell_first(found.name, tell)
                return loaded
        checkpoint = read_checkpoint(found, is_warm=True)
        from localllm.answer.drafters import find_drafters
        from localllm.answer.opening import load_checkpoint

        return load_checkpoint(checkpoint, find_drafters(checkpoint), listener)


def _started_ahead(keepalive_s: float | None) -> "AbstractContextManager[StartedProcess | None]":
    """The process of an engine, which imports while the model is found; None where an engine runs,
    which may be the right one.
    """
    if keepalive_s == 0 or not _HAS_SOCKETS:
        return nullcontext()
    from localllm.attach.addresses import is_any_running
    from localllm.attach.started_process import StartedProcess

    if is_any_running():
        return nullcontext()
    try:
        return StartedProcess()
    except OSError:  # to start one again says why
        return nullcontext()


def without_memory(tell: Tell) -> Tell:
    """`tell` for lines about loading a model, of which those on memory are only logged."""

    def tell_others(text: str) -> None:
        (logger.info if text.startswith(MEMORY) else tell)(text)

    return tell_others


def loading(name: str, doing: list[str]) -> StatusLine:
    """A status line for a load that takes long; the last item of `doing` names the current work."""
    began_s = time.monotonic()
    try:
        is_first = not any(cache_folder("kernels").glob("*.so"))
    except OSError:  # a folder that this user may not read
        is_first = True
    why = "; compiling kernels for this processor, once" if is_first else ""

    def describe() -> str:
        now = f"; {doing[-1]}" if doing and doing[-1] else why
        return f"loading {show_controls(name)}, {time.monotonic() - began_s:.0f} s{now}"

    return StatusLine(describe, LOADING_SHOWN_S)


def _for_several(found: "FoundModel") -> "FoundModel":
    """`found` with an engine that answers several requests at a time, since others will use it."""
    config = found.engine_config
    several = max(config.max_num_seqs, KEPT_AT_ONCE)
    return replace(found, engine_config=replace(config, max_num_seqs=several))


def _make_way(found: "FoundModel") -> None:
    """End engines that wait, where their memory is needed. Raises: as `find_weight_files`."""
    from localllm.attach.kept import make_way

    if _is_on_gpu(found.engine_config):
        needed = sys.maxsize  # an engine takes what a GPU has
    else:
        needed = _BESIDES_BYTES
        with suppress(OSError):  # whoever opens a file says what is wrong with it
            needed += sum(path.stat().st_size for path in find_weight_files(found.folder))
    for name in make_way(needed, available_bytes):
        logger.info("%s is no longer loaded: its memory is needed", name)


def _tell_first(name: str, tell: Tell) -> None:
    """Say that an engine stays, if that was never said."""
    shown = cache_folder("kept-engine")
    if shown.exists():
        return
    tell(
        f"{show_controls(name)} stays loaded for {KEEPALIVE_S / 60:.0f} minutes, and answers the "
        "next question at once: localllm ps shows it, localllm config set keepalive 0 ends that"
    )
    with suppress(OSError):
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.touch()


def _attach(found: "FoundModel", keepalive_s: float | None) -> "LoadedModel | None":
    from localllm.attach.attached import attach

    return attach(found, keepalive_s)


def _is_on_gpu(engine: EngineConfig) -> bool:
    """Whether the engine will run on a GPU, as far as that is known without importing torch."""
    return engine.device != "cpu" and has_gpu_driver()
