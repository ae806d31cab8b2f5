"""The note for a user who names no model: which one answers, and which real one to start with."""

from localllm.cli.output import note
from localllm.cli.status_line import StatusLine
from localllm.engine.config import EngineConfig
from localllm.hub.catalog import BUILT_IN_MODEL
from localllm.hub.recommendation import recommended_here

# A faster search shows nothing.
_SHOWN_S = 0.5


def welcome(engine: EngineConfig) -> None:
    """Write the note to stderr."""
    with StatusLine(lambda: "looking at this machine", _SHOWN_S):
        entry = recommended_here(engine.device)
    text = f"no model given: {BUILT_IN_MODEL} answers, a tiny built-in demonstration model"
    if entry is not None:
        text += f"; a real one for this machine: localllm chat {entry.alias}"
    note(text, dim=True)
