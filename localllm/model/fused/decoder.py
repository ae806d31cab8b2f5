"""The layers of a decoder in one call: which plans there is one for, and what it takes.

It computes what the blocks compute one by one, in the same order, to the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from localllm.model.blocks.attention import Attention, AttentionSpec
from localllm.model.blocks.gated_mlp import GatedMLP, GatedMLPSpec
from localllm.model.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from localllm.model.blocks.block import Rotation
    from localllm.model.inputs import ForwardBatch, PagedKVCache
    from localllm.model.layer import Layer, LayerPlan
    from localllm.model.linear import Projection


class FusedDecoder(Protocol):
    """The layers with the last norm."""

    def takes(self, batch: ForwardBatch) -> bool:
        """Whether it is the better way for such a batch."""

    def __call__(
        self,
        hidden: Tensor,
        rotation: Rotation,
        batch: ForwardBatch,
        kv_cache: PagedKVCache,
        taps: Sequence[int],
    ) -> tuple[Tensor, Mapping[int, Tensor]]:
        """Hidden states [num_rows, hidden] after the last norm, and the residual stream behind the
        layers in `taps`, by their numbers; the caches are written. `hidden`: the embedded tokens.
        """


def supports(plans: Sequence[LayerPlan]) -> bool:
    """Whether every layer is an attention and a gated feed-forward behind norms, and all of them
    are alike but for their windows.
    """
    kinds = {tuple(type(place.block) for place in plan.places) for plan in plans}
    if kinds != {(AttentionSpec, GatedMLPSpec)}:
        return False
    attentions = [place.block for plan in plans for place in plan.places[:1]]
    sizes = {replace(each, window=None) for each in attentions if isinstance(each, AttentionSpec)}
    return len(sizes) == 1 and len({plan.places[1].block for plan in plans}) == 1


@dataclass(frozen=True, slots=True)
class UniformLayer:
    """A layer of the supported kind."""

    input_norm: RMSNorm
    attention: Attention
    post_attention_norm: RMSNorm
    mlp: GatedMLP

    @classmethod
    def of(cls, layer: Layer) -> UniformLayer:
        """`layer`: one whose plan is supported."""
        first, second = layer.sublayers
        assert isinstance(first.block, Attention)
        assert isinstance(second.block, GatedMLP)
        return cls(first.norm, first.block, second.norm, second.block)

    @property
    def products(self) -> tuple[Projection, ...]:
        """In the order in which they compute."""
        return *self.attention.products, *self.mlp.products
