"""How `chat` comes by its model: from an engine that runs already, or by loading it."""

import logging
import os
import time
from typing import TYPE_CHECKING

from localllm.cli.first_start import welcome
from localllm.cli.output import note, show_controls
from localllm.cli.status_line import StatusLine
from localllm.cli.variants import choose_variant
from localllm.engine.config import EngineConfig
from localllm.engine.listener import Listener
from localllm.hub.recommendation import has_gpu_driver
from localllm.user.places import cache_folder

if TYPE_CHECKING:
    from localllm.answer.loaded_model import LoadedModel
    from localllm.hub.checkpoint import FoundModel

logger = logging.getLogger(__name__)

# A model that is loaded sooner shows nothing.
LOADING_SHOWN_S = 1.0
# An engine on a GPU waits so long for the next question of a script; one on a CPU does not.
GPU_KEEPALIVE_S = 300.0
# Of the kind that engines are found by.
_HAS_SOCKETS = os.name == "posix"


def open_noted(
    name: str | None,
    engine: EngineConfig,
    *,
    is_conversation: bool,
    keepalive_s: float | None = None,
) -> "LoadedModel":
    """Open the model, with the notice that none was asked for, or how memory is divided.

    `keepalive_s`: how long its engine is to wait for the next question, in a process of its own;
    None: as usual, 0: not at all, below: for ever.
    """
    from localllm.cli.download_progress import TerminalProgress
    from localllm.hub.checkpoint import find_model, read_checkpoint

    if name is None:
        welcome(engine)
    chosen = choose_variant(name, engine)
    found = find_model(chosen, engine, TerminalProgress())
    attached = _attach(found, keepalive_s) if _HAS_SOCKETS else None
    if attached is not None:
        if is_conversation:
            note(f"{found.name} is loaded already: localllm ps shows where", dim=True)
        return attached
    if keepalive_s is None:
        keepalive_s = 0.0 if is_conversation or not _is_on_gpu(engine) else GPU_KEEPALIVE_S
    doing: list[str] = []
    with loading(found.name, doing) as line:

        def tell(text: str) -> None:
            line.say(lambda: note(text, dim=True))

        listener = Listener(tell if is_conversation else logger.info, doing.append)

        if keepalive_s != 0 and _HAS_SOCKETS:
            from localllm.attach.attached import start

            try:
                return start(found, keepalive_s, logging.getLogger().level, listener)
            except OSError as error:
                tell(f"no engine can be left running ({error})")
        checkpoint = read_checkpoint(found)
        checkpoint.tokenizer.warm()
        from localllm.answer.opening import load_checkpoint

        return load_checkpoint(checkpoint, listener)


def loading(name: str, doing: list[str]) -> StatusLine:
    """Says so, where it takes long; `doing`: the last of it is what takes long just now."""
    began_s = time.monotonic()
    try:
        is_first = not any(cache_folder("kernels").glob("*.so"))
    except OSError:  # a folder that this user may not look into
        is_first = True
    why = "; kernels are compiled for this processor, once" if is_first else ""

    def describe() -> str:
        now = f"; {doing[-1]}" if doing and doing[-1] else why
        return f"loading {show_controls(name)}, {time.monotonic() - began_s:.0f} s{now}"

    return StatusLine(describe, LOADING_SHOWN_S)


def _attach(found: "FoundModel", keepalive_s: float | None) -> "LoadedModel | None":
    from localllm.attach.attached import AttachedEngine, attach

    attached = attach(found)
    if attached is not None and keepalive_s is not None:
        assert isinstance(attached.text_engine, AttachedEngine)
        attached.text_engine.keep_for(keepalive_s)
    return attached


def _is_on_gpu(engine: EngineConfig) -> bool:
    """Whether an engine will be, as far as that can be told without loading torch."""
    if engine.device != "auto":
        return engine.device == "cuda"
    return has_gpu_driver()
