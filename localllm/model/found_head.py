"""A head in files, before it is loaded, and the names that its tensors have there."""

from collections.abc import Mapping
from dataclasses import dataclass

from localllm.model.architecture import Architecture
from localllm.model.tensor_info import TensorInfo
from localllm.model.weight_check import WeightMap

# The norms of a head's join, by the names that the loader knows.
EMBEDDING_NORM, HIDDEN_NORM = "model.join_embedding_norm", "model.join_hidden_norm"


@dataclass(frozen=True, slots=True)
class HeadLayout:
    """How the names of a head's tensors begin in files, and how they do here; the first that fits
    decides. Tensors whose names begin with nothing here are not read.
    """

    names: tuple[tuple[str, str], ...]

    def stored_name(self, own: str) -> str:
        """The name in files of a tensor that the loader knows as `own`."""
        for stored, beginning in self.names:
            if beginning and own.startswith(beginning):
                return stored + own.removeprefix(beginning)
        raise KeyError(own)

    def renamed(self, found: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """The head's tensors among those of files, by the names that the loader knows."""
        renamed = {}
        for name, info in found.items():
            for stored, own in self.names:
                if name.startswith(stored):
                    if own:
                        renamed[own + name.removeprefix(stored)] = info
                    break
        return renamed


@dataclass(frozen=True, slots=True)
class FoundHead:
    """A head in files, whose tensors have the names that the loader knows.

    `kind`: what users call it; `taps`: the hidden states of the target that it takes, and `own_tap`
    its own that stands for them in the next step, see `DecoderModel.forward_tapped`.
    """

    kind: str
    architecture: Architecture
    weights: WeightMap
    layout: HeadLayout
    taps: tuple[int, ...]
    own_tap: int

    @property
    def states_width(self) -> int:
        """Values of the target's hidden states that it takes of a token."""
        join = self.architecture.join
        assert join is not None
        if join.fusion is None:
            return join.state_width(self.architecture.hidden_size)
        return join.fusion.width_in

    @property
    def reads_target(self) -> bool:
        """Whether it makes no entries of its own, but attends to those of its target."""
        return not self.architecture.cache_groups
