"""The note for a user who names no model: which one answers, and which real one to start with."""

from contextlib import suppress

from localllm.cli.draw.output import note
from localllm.cli.draw.status_line import StatusLine
from localllm.engine.config import EngineConfig
from localllm.hub.catalog import BUILT_IN_MODEL
from localllm.hub.recommendation import recommended_here
from localllm.user.places import cache_folder

# A faster search shows nothing.
_SHOWN_S = 0.5


def welcome(engine: EngineConfig, *, is_once: bool) -> None:
    """Write the note to stderr; `is_once`: unless it was written before."""
    shown = cache_folder("welcome")
    if is_once and shown.exists():
        return
    with StatusLine(lambda: "looking at this machine", _SHOWN_S):
        entry = recommended_here(engine.device)
    text = f"no model given: {BUILT_IN_MODEL} answers, a tiny built-in demonstration model"
    if entry is not None:
        text += f"; a real one for this machine: localllm chat {entry.alias}"
    note(text, dim=True)
    with suppress(OSError):
        shown.parent.mkdir(parents=True, exist_ok=True)
        shown.touch()
