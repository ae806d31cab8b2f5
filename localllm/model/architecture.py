"""What a model is: its sizes, its layers, and the names of its tensors in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.block import BlockSpec, KVState, LinearGroup, RowBytes
from localllm.model.config_fields import DType
from localllm.model.layer import LayerPlan
from localllm.model.rope_config import RopeConfig

_Spec = TypeVar("_Spec")
EMBEDDING, LAST_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head"


def layer_name(index: int) -> str:
    """What the names of a layer's tensors begin with."""
    return f"model.layers.{index}"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that remember alike, by their numbers."""

    state: KVState
    layers: tuple[int, ...]

    def token_bytes(self, row_bytes: RowBytes) -> int:
        """Bytes that a token takes in all of them."""
        return len(self.layers) * self.state.token_bytes(row_bytes)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder without its weights; everything that depends on the family is in `layers`.

    `rms_norm_eps`: of the last norm.
    """

    name: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    dtype: DType
    layers: tuple[LayerPlan, ...]
    eos_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = field(default=None, compare=False)

    @property
    def num_layers(self) -> int:
        """Layers."""
        return len(self.layers)

    @property
    def workspace(self) -> int:
        """Values that a layer holds for a token, beside the residual stream: of the largest."""
        return max(layer.workspace for layer in self.layers)

    def blocks(self) -> Counter[BlockSpec]:
        """The blocks of all layers, and how many there are of each."""
        return Counter(place.block for layer in self.layers for place in layer.places)

    def blocks_of(self, kind: type[_Spec]) -> list[_Spec]:
        """The different blocks of a kind, in the order of the layers."""
        return [block for block in self.blocks() if isinstance(block, kind)]

    @property
    def cache_places(self) -> tuple[tuple[int, int] | None, ...]:
        """Of each layer its cache group, and its place there; None for one without a state."""
        places: list[tuple[int, int] | None] = [None] * self.num_layers
        for i, group in enumerate(self.cache_groups):
            for place, layer in enumerate(group.layers):
                places[layer] = (i, place)
        return tuple(places)

    def gathered_bytes(self, context: int) -> int:
        """Bytes at once, where state is taken out of its blocks before it is read."""
        return max(block.gathered_bytes(context) for block in self.blocks())

    def token_bytes(self, row_bytes: RowBytes) -> int:
        """Bytes of the cache that a token takes in all layers."""
        return sum(state.token_bytes(row_bytes) for state in self.states)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The different rotary embeddings of the layers."""
        return tuple(dict.fromkeys(each.rope for each in self.blocks_of(AttentionSpec)))

    @property
    def states(self) -> list[KVState]:
        """What the layers remember, in their order."""
        return [layer.state for layer in self.layers if layer.state is not None]

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers by what they remember: those with the same needs share a group."""
        found: dict[KVState, list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.state is not None:
                found.setdefault(layer.state, []).append(i)
        return tuple(CacheGroup(state, tuple(layers)) for state, layers in found.items())

    def groups(self) -> Iterator[tuple[str, LinearGroup]]:
        """Every product of the layers: the name of its layer, and its linears."""
        for i, layer in enumerate(self.layers):
            for place in layer.places:
                for group in place.block.products:
                    yield layer_name(i), group

    def linears(self) -> dict[str, tuple[int, int]]:
        """Every linear by its full name, the head where it is one of its own: (out, in)."""
        shapes = {
            f"{layer_name(i)}.{name}": shape
            for i, layer in enumerate(self.layers)
            for name, shape, _ in layer.linears()
        }
        if not self.tie_word_embeddings:
            shapes[HEAD] = (self.vocab_size, self.hidden_size)
        return shapes

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that an unquantized checkpoint must hold.

        With tied embeddings the head is the embedding table; a stored head is accepted and ignored.
        """
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.hidden_size)}
        for i, layer in enumerate(self.layers):
            own = layer.tensors()
            shapes |= {f"{layer_name(i)}.{name}": shape for name, shape in own.items()}
        shapes[LAST_NORM] = (self.hidden_size,)
        if not self.tie_word_embeddings:
            shapes[f"{HEAD}.weight"] = (self.vocab_size, self.hidden_size)
        return shapes

    def describe(self) -> str:
        """The sizes that its operators follow from, in words."""
        blocks = ", ".join(dict.fromkeys(block.describe() for block in self.blocks()))
        return f"{self.hidden_size} wide, {blocks}, {self.vocab_size} tokens"
