"""Who is told how the loading of a model goes on."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)

Tell = Callable[[str], None]


def _nobody(_: str) -> None:
    pass


@dataclass(frozen=True, slots=True)
class Listener:
    """`line`: is told what is worth a line of its own; `doing`: what takes long just now, in words
    that follow "loading Qwen3-8B, 12 s;".
    """

    line: Tell = logger.info
    doing: Tell = _nobody


LOGGED = Listener()
