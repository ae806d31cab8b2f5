"""What the table of families says about each of GGUF's architectures."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from localllm.model.gguf.heads import usual_heads
from localllm.model.gguf.keys import GgufKeys
from localllm.model.gguf.names import Names

Fields = dict[str, Any]


def _nothing(keys: GgufKeys) -> Fields:
    return {}


def _always(keys: GgufKeys) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """An architecture of GGUF, or the files of one that `applies` is true for.

    `model_class`: the class of transformers that computes the same; `config`: the fields of its
    config.json beyond those that all share; `heads`: the sizes of heads and their rotation;
    `names`: the loader's names of a layer's tensors, by GGUF's, where they are not the usual ones;
    `top`: those beside the layers; `is_paired`: in queries and keys the two values that turn
    together stand side by side, though the class has them half a head apart; `has_raised_norms`:
    the weights of norms are stored plus 1, but for one within a recurrence.
    """

    model_class: str
    config: Callable[[GgufKeys], Fields] = _nothing
    names: Names = field(default_factory=dict)
    top: Mapping[str, str] = field(default_factory=dict)
    heads: Callable[[GgufKeys], Fields] = usual_heads
    applies: Callable[[GgufKeys], bool] = _always
    is_paired: bool = False
    has_raised_norms: bool = False
