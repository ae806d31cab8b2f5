"""Open the model for `chat`: attach to a running engine, or load it."""

import logging
import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.cli.draw.output import note, show_controls
from localllm.cli.draw.status_line import StatusLine
from localllm.cli.models.first_start import welcome
from localllm.cli.models.variants import choose_variant
from localllm.engine.config import EngineConfig
from localllm.hub.recommendation import has_gpu_driver
from localllm.operators.listener import MEMORY, Listener, Tell
from localllm.user.places import cache_folder

if TYPE_CHECKING:
    from localllm.answer.loaded_model import LoadedModel
    from localllm.hub.checkpoint import FoundModel

logger = logging.getLogger(__name__)

# A shorter load shows nothing.
LOADING_SHOWN_S = 1.0
# How long an engine on a GPU waits for a script's next question; one on a CPU does not wait.
GPU_KEEPALIVE_S = 300.0
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
    the default, 0: not at all, negative: forever.
    """
    from localllm.cli.models.download_progress import TerminalProgress
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
    if keepalive_s is None:
        keepalive_s = 0.0 if is_conversation or not _is_on_gpu(engine) else GPU_KEEPALIVE_S
    doing: list[str] = []
    with loading(found.name, doing) as line:

        def tell(text: str) -> None:
            line.say(lambda: note(text, dim=True))

        lines = without_memory(tell) if is_conversation else logger.info
        listener = Listener(lines, doing.append)

        if keepalive_s != 0 and _HAS_SOCKETS:
            from localllm.attach.attached import start

            try:
                return start(_for_several(found), keepalive_s, logging.getLogger().level, listener)
            except OSError as error:
                tell(f"the engine cannot be kept running ({error})")
        checkpoint = read_checkpoint(found)
        checkpoint.tokenizer.warm()
        from localllm.answer.drafters import find_drafters
        from localllm.answer.opening import load_checkpoint

        return load_checkpoint(checkpoint, find_drafters(checkpoint), listener)


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


def _attach(found: "FoundModel", keepalive_s: float | None) -> "LoadedModel | None":
    from localllm.attach.attached import attach

    return attach(found, keepalive_s)


def _is_on_gpu(engine: EngineConfig) -> bool:
    """Whether the engine will run on a GPU, as far as that is known without importing torch."""
    if engine.device != "auto":
        return engine.device == "cuda"
    return has_gpu_driver()
