"""What a user sees who asks without a model: who answers, and which real one to begin with."""

from localllm.cli.output import note
from localllm.cli.status_line import StatusLine
from localllm.engine.config import EngineConfig
from localllm.hub.catalog import BUILT_IN_MODEL
from localllm.hub.recommendation import recommended_here

# What is found sooner shows nothing.
_SHOWN_S = 0.5


def welcome(engine: EngineConfig) -> None:
    """A line on stderr."""
    with StatusLine(lambda: "looking at this machine", _SHOWN_S):
        entry = recommended_here(engine.device)
    text = f"no model given: {BUILT_IN_MODEL} answers, a tiny built-in demonstration"
    if entry is not None:
        text += f"; a real one for this machine: localllm chat {entry.alias}"
    note(text, dim=True)
