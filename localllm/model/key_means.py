"""The means of the keys of models whose keys have a bias: a cache in 8 bits leaves them out.

Where the numbers of a key are far from 0 because of a bias (Qwen2), a scale for all of them leaves
few codes for what differs from key to key. A number that is the same for all keys of a head changes
all scores of a query alike, so their softmax stays as it is and nothing has to add it again.
"""

import torch
from torch import Tensor

from localllm.model.blocks.attention import Attention, AttentionSpec
from localllm.model.decoder import DecoderModel
from localllm_kernels.attention.kv_cache import CODE_LIMITS
from localllm_kernels.attention.rotary import apply_rotary_reference

# Windows of positions that stand for all of a context.
NUM_WINDOWS, WINDOW = 8, 128
_MOST_POSITIONS = 8192


def window_positions(num_positions: int) -> Tensor:
    """The positions of each window, int64 [NUM_WINDOWS, WINDOW], all below `num_positions`: most
    conversations are short, so each starts twice as far from the first as the one before.
    """
    span = max(0, min(num_positions, _MOST_POSITIONS) - WINDOW)
    starts = [0, *(span >> halvings for halvings in reversed(range(NUM_WINDOWS - 1)))]
    positions = torch.tensor(starts)[:, None] + torch.arange(WINDOW)
    return positions.clamp(max=num_positions - 1)


def key_means(model: DecoderModel, dtype: torch.dtype) -> tuple[Tensor | None, ...]:
    """Of each cache group, float32 [layers, kv_heads, head_dim]; None where a cache of `dtype` has
    keys as they are.
    """
    groups = model.architecture.cache_groups
    if dtype not in CODE_LIMITS:
        return (None,) * len(groups)
    blocks = [
        sublayer.block
        for layer in model.layers
        for sublayer in layer.sublayers
        if isinstance(sublayer.block, Attention) and sublayer.block.spec.state is not None
    ]
    if len(blocks) < sum(len(group.layers) for group in groups) or not any(
        _has_means(block.spec) for block in blocks
    ):
        return (None,) * len(groups)
    means = [_mean(block, model) for block in blocks]
    places = [place for place in model.architecture.cache_places if place is not None]
    of_groups = [
        torch.stack([mean for mean, place in zip(means, places, strict=True) if place[0] == i])
        for i in range(len(groups))
    ]
    return tuple(each if bool((each != 0).any()) else None for each in of_groups)


def _has_means(spec: AttentionSpec) -> bool:
    """Whether keys have a bias, and scores are only compared with each other."""
    scores = spec.scores
    has_plain_scores = scores.cap is None and not scores.has_sinks
    return spec.linears.qkv_bias and spec.norms is None and has_plain_scores and spec.has_values


def _mean(block: Attention, model: DecoderModel) -> Tensor:
    spec, embedding = block.spec, model.embedding
    shape = spec.num_kv_heads, spec.head_dim
    if not _has_means(spec):
        return torch.zeros(shape, device=embedding.device)
    positions = window_positions(model.ropes.num_positions).flatten().to(embedding.device)
    width = spec.hidden_size if spec.linears.width_in is None else spec.linears.width_in
    nothing = torch.zeros(1, width, dtype=embedding.row_dtype, device=embedding.device)
    first = spec.num_heads * spec.head_dim
    bias = block.qkv_proj(nothing)[:, first : first + shape[0] * shape[1]].float().view(1, *shape)
    rotation = model.ropes.rotations(positions)[block.rope]
    turned = apply_rotary_reference(bias.expand(len(positions), -1, -1), rotation.cos, rotation.sin)
    return turned.mean(0)
