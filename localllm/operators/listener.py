"""Receives progress messages while a model is loaded."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]
# How a line begins that says how memory is divided.
MEMORY = "memory"


def _nobody(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Listener:
    """Callbacks for progress messages.

    `line` gets messages that deserve a line of their own; `doing` gets what is taking long just
    now, in words that follow "loading Qwen3-8B, 12 s;".
    """

    line: Tell = logger.info
    doing: Tell = _nobody


LOGGED = Listener()
