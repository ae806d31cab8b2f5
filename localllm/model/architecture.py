"""An architecture: the sizes of a model, its layers, and its tensors' names in a checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, TypeVar

from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.block import BlockSpec, KVState, LinearGroup, RecurrentState, RowBytes
from localllm.model.blocks.delta_net import DeltaNetSpec
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.blocks.experts_beside import ExpertsBesideSpec
from localllm.model.blocks.latent_attention import LatentAttentionSpec
from localllm.model.blocks.latent_experts import LatentExpertsSpec
from localllm.model.blocks.mamba import MambaSpec
from localllm.model.dtypes import DType, StateDType
from localllm.model.join import JoinSpec
from localllm.model.layer import LayerPlan, Place
from localllm.model.norm import NormSpec
from localllm.model.per_layer_inputs import PROJECTION, PerLayerSpec
from localllm.model.rope_config import RopeConfig

_Spec = TypeVar("_Spec")
TABLE, FINAL_NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"
EMBEDDING = f"{TABLE}.weight"
# The head of a model that scores texts.
LABELS = "score.weight"


def layer_name(index: int) -> str:
    """The prefix of the names of a layer's tensors."""
    return f"model.layers.{index}"


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that keep the same kind of state, by index. `coded`: of a group for uncoded rows, the
    index of the one with their codes.
    """

    state: KVState
    layers: tuple[int, ...]
    coded: int | None = None

    def token_bytes(self, row_bytes: RowBytes) -> int:
        """Bytes per token, over all layers of the group."""
        return len(self.layers) * self.state.token_bytes(row_bytes)


@dataclass(frozen=True, slots=True)
class RecurrentGroup:
    """Layers whose recurrences keep the same, by index."""

    state: RecurrentState
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """The requests and snapshots with a state, and the most drafted tokens that a step may undo."""

    num_slots: int
    max_draft: int = 0


@dataclass(frozen=True, slots=True)
class Architecture:
    """A decoder without its weights; everything that depends on the family is in `layers`.

    `norm` is the final one. Embeddings are multiplied by `embedding_scale`, logits by `logit_scale`
    and then, with a `logit_cap`, kept within it: cap · tanh(logit / cap). `per_layer`: what each
    layer's blocks read besides the residual stream; `has_tower`: the files hold a vision tower too,
    see tower.py. `writes_text`: false for a model that was saved without an output head;
    `num_labels`: rows of the head that scores texts in its place, if there is one. `join`: of a
    head that drafts for another model, see mtp.py and eagle.py. `start_token_ids`: the first
    token of texts, if the config names one; `unknown_fields`: those of its config.json that are
    ignored, see known_fields.py. `own_keys`: those of a run that are kept as they are beside a
    cache in 4 bits, see four_bits.py; 0: none.
    """

    name: str
    vocab_size: int
    hidden_size: int
    max_position_embeddings: int
    norm: NormSpec
    tie_word_embeddings: bool
    dtype: DType
    layers: tuple[LayerPlan, ...]
    eos_token_ids: tuple[int, ...] = ()
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_cap: float | None = None
    per_layer: PerLayerSpec | None = None
    join: JoinSpec | None = None
    has_tower: bool = False
    writes_text: bool = True
    num_labels: int = 0
    own_keys: int = 0
    quantization: Mapping[str, Any] | None = field(default=None, compare=False)
    start_token_ids: tuple[int, ...] = field(default=(), compare=False)
    unknown_fields: tuple[str, ...] = field(default=(), compare=False)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def workspace(self) -> int:
        """Values per token that the largest layer holds, besides the residual stream."""
        return max(layer.workspace for layer in self.layers)

    def blocks(self) -> Counter[BlockSpec]:
        """The blocks of all layers, with the number of each."""
        return Counter(place.block for layer in self.layers for place in layer.places)

    def blocks_of(self, kind: type[_Spec]) -> list[_Spec]:
        """The distinct blocks of one kind, in layer order."""
        return [block for block in self.blocks() if isinstance(block, kind)]

    @property
    def cache_places(self) -> tuple[tuple[int, int] | None, ...]:
        """The cache group of what each layer keeps or reads, and its place there; or None."""
        places: list[tuple[int, int] | None] = [None] * self.num_layers
        for i, group in enumerate(self.cache_groups):
            for place, layer in enumerate(group.layers if group.coded is None else ()):
                places[layer] = (i, place)
        for i, plan in enumerate(self.layers):
            if plan.reads is not None:
                places[i] = places[plan.reads]
        return tuple(places)

    @property
    def last_state(self) -> int:
        """The number of layers up to the last one with state; later ones need few rows."""
        kept = (layer.state or layer.recurrence for layer in self.layers)
        return max((i + 1 for i, state in enumerate(kept) if state), default=0)

    def token_bytes(self, row_bytes: RowBytes) -> int:
        """Bytes of cache per token, over all layers."""
        return sum(state.token_bytes(row_bytes) for state in self.states)

    @property
    def ropes(self) -> tuple[RopeConfig, ...]:
        """The distinct rotary embeddings of the layers."""
        kinds = AttentionSpec | LatentAttentionSpec
        found = (block.rope for block in self.blocks() if isinstance(block, kinds))
        return tuple(dict.fromkeys(found))

    def attentions(self) -> list[AttentionSpec]:
        """The distinct attentions as operators compute them, in layer order."""
        found = []
        for block in self.blocks():
            match block:
                case AttentionSpec():
                    found.append(block)
                case LatentAttentionSpec():
                    found.append(block.over_rows)
        return list(dict.fromkeys(found))

    def rotations(self) -> list[AttentionSpec]:
        """The distinct rotations as operators compute them, each as an attention without window."""
        found: list[AttentionSpec] = []
        for block in self.blocks():
            match block:
                case AttentionSpec():
                    found.append(replace(block, window=None))
                case LatentAttentionSpec():
                    found += block.rotations
        return list(dict.fromkeys(found))

    @property
    def states(self) -> list[KVState]:
        """The state of each layer that keeps one, in layer order."""
        return [layer.state for layer in self.layers if layer.state is not None]

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """The layers grouped by state: layers with the same needs share a group. Those for uncoded
        rows are the last ones.
        """
        found: dict[KVState, list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.state is not None:
                found.setdefault(layer.state, []).append(i)
        groups = [CacheGroup(state, tuple(layers)) for state, layers in found.items()]
        for i, (state, layers) in enumerate(found.items() if self.own_keys else ()):
            window = min(self.own_keys, state.window or self.own_keys)
            groups.append(CacheGroup(replace(state, window=window), tuple(layers), i))
        return tuple(groups)

    @property
    def recurrent_groups(self) -> tuple[RecurrentGroup, ...]:
        """The layers that are recurrences, grouped by what they keep."""
        found: dict[RecurrentState, list[int]] = {}
        for i, layer in enumerate(self.layers):
            if layer.recurrence is not None:
                found.setdefault(layer.recurrence, []).append(i)
        return tuple(RecurrentGroup(state, tuple(layers)) for state, layers in found.items())

    def with_states(self, dtype: StateDType) -> Architecture:
        """The same, whose recurrences keep their matrices in `dtype`."""
        layers = tuple(
            replace(layer, places=tuple(_with_state(place, dtype) for place in layer.places))
            for layer in self.layers
        )
        return replace(self, layers=layers)

    def slot_bytes(self, more_rows: int = 0) -> int:
        """Bytes of what all recurrences keep of one request, see `RecurrentState.num_bytes`."""
        return sum(
            len(group.layers) * group.state.num_bytes(more_rows) for group in self.recurrent_groups
        )

    def groups(self) -> Iterator[tuple[str, LinearGroup]]:
        """Every product of the layers: the prefix of its layer, and its linears."""
        for i, layer in enumerate(self.layers):
            for place in layer.places:
                for group in place.block.products:
                    yield layer_name(i), group

    @property
    def has_experts(self) -> bool:
        """Whether a layer has experts."""
        return any(True for _ in self.experts())

    def experts(self) -> Iterator[tuple[str, ExpertsSpec]]:
        """The mixtures of experts, each with the prefix of its layer."""
        for i, layer in enumerate(self.layers):
            for place in layer.places:
                match place.block:
                    case ExpertsSpec() as experts:
                        yield layer_name(i), experts
                    case ExpertsBesideSpec(experts=experts) | LatentExpertsSpec(experts=experts):
                        yield layer_name(i), experts

    def expert_linears(self) -> set[str]:
        """The linears of experts, by full name."""
        return {
            f"{layer}.{name}"
            for layer, spec in self.experts()
            for number in range(spec.router.num_experts)
            for name in spec.expert_at(number).names
        }

    def dense_linears(self) -> set[str]:
        """The linears that are dequantized as they are loaded, by full name."""
        dense = ((layer, group) for layer, group in self.groups() if group.is_dense)
        return {f"{layer}.{name}" for layer, group in dense for name in group.names}

    def shares(self) -> dict[str, float]:
        """The part of the rows that compute each of the layers' linears, by full name."""
        return {
            f"{layer}.{name}": group.share for layer, group in self.groups() for name in group.names
        }

    def quantized(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the layers' linears that `quantize` changes, by full name."""
        shapes = self.layer_linears()
        names = (
            f"{layer_name(i)}.{name}"
            for i, layer in enumerate(self.layers)
            for name in layer.quantized()
        )
        return {name: shapes[name] for name in names}

    def unread(self) -> set[str]:
        """Names of keys' and values' tensors that files may hold though nothing reads them."""
        return {
            f"{layer_name(i)}.{name}"
            for i, layer in enumerate(self.layers)
            for place in layer.places
            if isinstance(place.block, AttentionSpec)
            for name in place.block.unread
        }

    def layer_linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the layers' linears by their full names."""
        return {
            f"{layer_name(i)}.{name}": shape
            for i, layer in enumerate(self.layers)
            for name, shape, _ in layer.linears()
        }

    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every linear by its full name, with the head unless it is tied."""
        shapes = self.layer_linears()
        if self.per_layer is not None:
            shapes[PROJECTION] = (self.num_layers * self.per_layer.width, self.hidden_size)
        if self.join is not None:
            shapes |= self.join.linears(self.hidden_size)
            if self.join.num_drafted is not None:
                shapes[HEAD] = (self.join.num_drafted, self.hidden_size)
        if not self.tie_word_embeddings:
            shapes[HEAD] = (self.vocab_size, self.hidden_size)
        return shapes

    @property
    def num_parameters(self) -> int:
        """Values of all tensors."""
        return sum(map(prod, self.tensors().values()))

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor that an unquantized checkpoint must hold.

        With tied embeddings the head is the embedding table; a stored head is accepted and ignored.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        if self.join is None or self.join.has_embedding:
            shapes[EMBEDDING] = (self.vocab_size, self.hidden_size)
        if self.join is not None:
            shapes |= self._join_tensors(self.join)
        for i, layer in enumerate(self.layers):
            own = layer.tensors()
            shapes |= {f"{layer_name(i)}.{name}": shape for name, shape in own.items()}
        if self.join is None or self.join.has_last_norm:
            shapes[f"{self.norm.name}.weight"] = (self.hidden_size,)
        if self.per_layer is not None:
            shapes |= self.per_layer.tensors(self.hidden_size, self.num_layers)
        if not self.tie_word_embeddings:
            shapes[f"{HEAD}.weight"] = (self.vocab_size, self.hidden_size)
        if self.num_labels:
            shapes[LABELS] = (self.num_labels, self.hidden_size)
        return shapes

    def _join_tensors(self, join: JoinSpec) -> dict[str, tuple[int, ...]]:
        linears = join.linears(self.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": linears[name] for name in linears}
        if join.num_drafted is not None:
            shapes[f"{HEAD}.weight"] = (join.num_drafted, self.hidden_size)
        return shapes | join.vectors(self.hidden_size)

    def describe(self) -> str:
        """The sizes that determine its operators, in words."""
        blocks = ", ".join(dict.fromkeys(block.describe() for block in self.blocks()))
        return f"{self.hidden_size} wide, {blocks}, {self.vocab_size} tokens"


def _with_state(place: Place, dtype: StateDType) -> Place:
    match place.block:
        case DeltaNetSpec() | MambaSpec() as block:
            return replace(place, block=replace(block, state_dtype=dtype))
    return place
