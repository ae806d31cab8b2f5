"""LFM2 and LFM2-MoE: short convolutions in most layers, attention with norms on each head in the
others. LFM2-MoE has experts behind its first layers, chosen by the sigmoids of their scores.

transformers adds 1e-6 to the sum that the experts' factors are divided by, and this does not: as
sums of sigmoids are near 1 or more, results differ by a millionth.
"""

from collections.abc import Sequence
from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import QueryKeyNorms
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.router import RouterSpec
from localllm.model.blocks.short_conv import ShortConvSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_expert,
    read_gated_mlp,
)
from localllm.model.norm import NormSpec

CONV = "conv"
MLP_NAMES = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
LAST_NORM = "model.embedding_norm"
_EXPERT = "feed_forward.experts.{}."
_EXPERT_NAMES = (f"{_EXPERT}w1", f"{_EXPERT}w3", f"{_EXPERT}w2")


def read_lfm2(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    mlp = _read_adjusted_mlp(fields)
    return _read(fields, [mlp] * fields.num_layers())


def read_lfm2_moe(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    num_experts, top_k = fields.num_experts()
    router = RouterSpec(
        num_experts,
        top_k,
        linear="feed_forward.gate",
        is_sigmoid=True,
        renormalises=fields.flag("norm_topk_prob", default=True),
        factor=fields.routed_factor(),
        correction="feed_forward.expert_bias" if fields.flag("use_expert_bias") else None,
    )
    experts = ExpertsSpec(read_expert(fields, "moe_intermediate_size", _EXPERT_NAMES), router)
    dense = replace(read_gated_mlp(fields), names=MLP_NAMES)
    num_layers = fields.num_layers()
    num_dense = fields.integer("num_dense_layers", 0, num_layers)
    return _read(fields, [dense] * num_dense + [experts] * (num_layers - num_dense))


def read_short_conv(fields: ConfigFields) -> ShortConvSpec:
    """Raises: CheckpointError."""
    taps = fields.integer("conv_L_cache", 2, 64)
    return ShortConvSpec(fields.hidden_size(), taps, fields.flag("conv_bias"))


def _read(fields: ConfigFields, seconds: Sequence[GatedMLPSpec | ExpertsSpec]) -> Architecture:
    """A decoder with one of `seconds` in each layer."""
    eps, conv = fields.eps(), read_short_conv(fields)
    norms = QueryKeyNorms(eps, "self_attn.q_layernorm", "self_attn.k_layernorm")
    attention = read_attention(fields, norms=norms)
    linears = replace(attention.linears, output="self_attn.out_proj")
    attention = replace(attention, linears=linears)
    layers = [
        pre_norm_layer(
            fields, attention if is_full else conv, second, names=("operator_norm", "ffn_norm")
        )
        for is_full, second in zip(_kinds(fields), seconds, strict=True)
    ]
    return read_decoder(fields, layers, norm=NormSpec(LAST_NORM, eps))


def _kinds(fields: ConfigFields) -> list[bool]:
    """Of each layer whether it is attention: by `layer_types`, or those of `full_attn_idxs`."""
    num_layers = fields.num_layers()
    found = fields.choices("layer_types", (FULL, CONV), num_layers)
    if found is not None:
        return [each == FULL for each in found]
    full = fields.get("full_attn_idxs")
    if full is None:
        return [True] * num_layers
    if not isinstance(full, list) or not all(each in range(num_layers) for each in full):
        fields.fail("full_attn_idxs", f"a list of layers below {num_layers}")
    return [i in full for i in range(num_layers)]


def _read_adjusted_mlp(fields: ConfigFields) -> GatedMLPSpec:
    """The feed-forward, whose inner size the config gives before it is adjusted."""
    mlp = replace(read_gated_mlp(fields), names=MLP_NAMES)
    if not fields.flag("block_auto_adjust_ff_dim"):
        return mlp
    factor = fields.number("block_ffn_dim_multiplier", 0.0, 64.0, default=1.0)
    multiple = fields.integer("block_multiple_of", 1, 1 << 20)
    inner_size = int(factor * int(2 * mlp.inner_size / 3))
    return replace(mlp, inner_size=-(-inner_size // multiple) * multiple)
