"""The names of a text model's tensors in a checkpoint that has a vision tower too."""

from collections.abc import Mapping
from typing import TypeVar

Info = TypeVar("Info")
# How they begin there, in newer and older checkpoints, and how the text model alone calls them.
_PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)


def text_tensors(found: Mapping[str, Info]) -> dict[str, Info]:
    """The tensors of the text model by its own names; those of the tower are left out."""
    own = {}
    for name, info in found.items():
        for prefix, replacement in _PREFIXES:
            if name.startswith(prefix):
                own[replacement + name.removeprefix(prefix)] = info
                break
    return own
