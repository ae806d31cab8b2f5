"""The layers of a decoder in one call: the interface, and the plans that are supported.

It computes the same as the blocks one by one, in the same order and to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from localllm.model.blocks.attention import Attention, AttentionSpec
from localllm.model.blocks.delta_net import DeltaNetSpec
from localllm.model.blocks.experts import ExpertsSpec, MixtureOfExperts
from localllm.model.blocks.gated_mlp import GatedMLP, GatedMLPSpec
from localllm.model.blocks.mamba import MambaSpec
from localllm.model.blocks.recurrence import Recurrence
from localllm.model.norm import Norm, NormSpec
from localllm.model.rope_config import NO_ROPE

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.inputs import ForwardBatch
    from localllm.model.layer import Layer, LayerPlan
    from localllm.model.linear import Projection
    from localllm.model.paged_kv_cache import PagedKVCache
    from localllm.model.rope import RopeTable, Rotation
    from localllm_kernels.cpu.team import Team


class FusedDecoder(Protocol):
    """The layers and the final norm in one call. `team`: the threads of the C library, if that
    computes them; torch then multiplies nothing.
    """

    team: Team | None

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether to use it for this batch."""

    def __call__(
        self,
        hidden: Tensor,
        rotations: Mapping[RopeTable, Rotation],
        batch: ForwardBatch,
        kv_cache: PagedKVCache,
        taps: Sequence[int],
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Hidden states [num_rows, hidden] after the final norm, and the residual stream after each
        layer in `taps`, by layer index. Writes the caches. `hidden`: the embedded tokens.
        """


def supports(plans: Sequence[LayerPlan], last_norm: NormSpec) -> bool:
    """Whether every layer is an attention or a recurrence and a gated feed-forward, or experts,
    each with norms around it or not; some layers have attention; and all attentions and all
    feed-forwards are alike, except for windows and rotations.
    """
    attentions, seconds, norms = set(), set(), [last_norm]
    for plan in plans:
        match [place.block for place in plan.places]:
            case [AttentionSpec() as attention, GatedMLPSpec() | ExpertsSpec() as mlp] if (
                attention.has_plain_rows
            ):
                attentions.add(replace(attention, window=None, rope=NO_ROPE))
                if attention.norms is not None:
                    norms.append(NormSpec("", attention.norms.eps))
            case [DeltaNetSpec() | MambaSpec(), GatedMLPSpec() | ExpertsSpec() as mlp]:
                pass
            case _:
                return False
        seconds |= {(mlp, place.scale) for place in plan.places}
        norms += [norm for place in plan.places for norm in place.norms]
        if any(place.shares_input or place.factor is not None for place in plan.places):
            return False
    are_alike = len({norm.eps for norm in norms}) == 1 and not any(n.is_centred for n in norms)
    return are_alike and len(attentions) == len(seconds) == 1


def is_plain(plans: Sequence[LayerPlan]) -> bool:
    """Whether supported layers are as Llama's: norms before blocks, SiLU, and one rotation."""
    places = [place for plan in plans for place in plan.places]
    attentions = [place.block for place in places if isinstance(place.block, AttentionSpec)]
    gates = {each.block.gate for each in places if isinstance(each.block, GatedMLPSpec)}
    has_experts = any(isinstance(each.block, ExpertsSpec) for each in places)
    if has_experts or len(attentions) < len(plans):
        return False
    are_plain = all(each.is_plain for each in places) and all(each.is_plain for each in attentions)
    return are_plain and len({each.rope for each in attentions}) == 1 and gates <= {"silu"}


@dataclass(frozen=True, slots=True)
class UniformLayer:
    """A layer of the supported kind."""

    mixer: Attention | Recurrence
    mlp: GatedMLP | MixtureOfExperts
    # Before and after the mixer, before and after the feed-forward.
    norms: tuple[Norm | None, Norm | None, Norm | None, Norm | None]

    @classmethod
    def of(cls, layer: Layer) -> UniformLayer:
        """From `layer`, whose plan must be supported."""
        first, second = layer.sublayers
        assert isinstance(first.block, Attention | Recurrence)
        assert isinstance(second.block, GatedMLP | MixtureOfExperts)
        norms = (first.norm, first.after, second.norm, second.after)
        return cls(first.block, second.block, norms)

    @property
    def products(self) -> tuple[Projection, ...]:
        """Its products, in the order of computation."""
        return *self.mixer.products, *self.mlp.products

    @property
    def attention(self) -> Attention:
        """The mixer of a layer that is known to have attention."""
        assert isinstance(self.mixer, Attention)
        return self.mixer
