"""The choice of a decoder's acceleration."""

from collections.abc import Sequence

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import Attention
from localllm.model.ends import ClusteredHead, Embedding, Head
from localllm.model.fused.cpu import CpuDecoder
from localllm.model.fused.cpu_head import CpuHead
from localllm.model.fused.decoder import FusedDecoder, UniformLayer, is_plain, supports
from localllm.model.join import Join
from localllm.model.layer import Layer
from localllm.model.norm import Norm
from localllm_kernels import Ops
from localllm_kernels.compiling.choice import FUSED
from localllm_kernels.cpu.linear import CpuLinears
from localllm_kernels.cpu.product import CProduct
from localllm_kernels.products.traits import TRITON_TRAITS


def fuse_layers(
    architecture: Architecture, layers: Sequence[Layer], last_norm: Norm | None, ops: Ops
) -> FusedDecoder | None:
    """All layers in one call; None if the library of `ops` does not support that."""
    is_wide = architecture.join is not None and architecture.join.is_wide
    if last_norm is None or is_wide or not supports(architecture.layers, architecture.norm):
        return None
    uniform = [UniformLayer.of(layer) for layer in layers]
    products = [product for layer in uniform for product in layer.products]
    own = ops.linears
    if isinstance(own, CpuLinears) and all(isinstance(each, CProduct) for each in products):
        places = architecture.cache_places
        share = architecture.layers[0].places[0].scale
        return CpuDecoder(own.library, own.team, uniform, places, last_norm, share)
    if ops.traits is TRITON_TRAITS and is_plain(architecture.layers):
        from localllm.model.fused.gpu import GpuDecoder

        return None if FUSED & ops.choice.to_torch else GpuDecoder.of(own, uniform, last_norm)
    return None


def fuse_head(
    fused: FusedDecoder | None,
    layers: Sequence[Layer],
    embedding: Embedding,
    join: Join,
    head: Head | ClusteredHead,
) -> CpuHead | None:
    """A head's drafts in one call; None if that is not supported. `fused`: its layers in one."""
    attention = layers[0].sublayers[0].block
    if (
        len(layers) > 1
        or not isinstance(attention, Attention)
        or attention.spec.scores.growth is not None
    ):
        return None
    if isinstance(head, ClusteredHead) or not CpuHead.supports(fused, embedding, join, head):
        return None
    assert isinstance(fused, CpuDecoder)
    return CpuHead(fused, embedding, join, head, attention.rope)
