"""The names of tensors in files, and those that the loader knows them by."""

from collections.abc import Mapping
from typing import TypeVar

from localllm.model.architecture import Architecture
from localllm.model.tower import text_tensors

Info = TypeVar("Info")
# By class: how names begin in files, in order, and how they do here. Written ones begin as the last
# that fits says.
_BEGINNINGS = {
    "NemotronHForCausalLM": (
        ("backbone.", "model."),
        ("model.embeddings.", "model.embed_tokens."),
        ("model.norm_f.", "model.norm."),
    ),
}


def own_tensors(found: Mapping[str, Info], architecture: Architecture) -> dict[str, Info]:
    """The tensors of the text model by the names that the loader knows."""
    named = text_tensors(found) if architecture.has_tower else dict(found)
    for stored, own in _BEGINNINGS.get(architecture.name, ()):
        named = {_renamed(name, stored, own): info for name, info in named.items()}
    if not any(name.startswith("model.") for name in named):
        # Saved without a head, as embedding models are.
        named = {_renamed(name, "", "model."): info for name, info in named.items()}
    return named


def named_for_files(found: Mapping[str, Info], architecture: Architecture) -> dict[str, Info]:
    """The same by the names that newer files give them."""
    named = dict(found)
    for stored, own in reversed(_BEGINNINGS.get(architecture.name, ())[1:]):
        named = {_renamed(name, own, stored): info for name, info in named.items()}
    return named


def _renamed(name: str, before: str, after: str) -> str:
    return after + name.removeprefix(before) if name.startswith(before) else name
