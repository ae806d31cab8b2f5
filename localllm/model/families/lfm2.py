"""LFM2: short convolutions in most layers, attention with norms on each head in the others."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec, QueryKeyNorms
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.short_conv import ShortConvSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_hidden_size,
    read_num_layers,
)
from localllm.model.layer import LayerPlan, Place
from localllm.model.norm import NormSpec

_NAMES = ("feed_forward.w1", "feed_forward.w3", "feed_forward.w2")
_CONV = "conv"


def read_lfm2(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    given = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
    raw = {
        **fields.raw,
        **{to: fields.raw[name] for name, to in given.items() if name in fields.raw},
    }
    fields = ConfigFields({**raw, "rms_norm_eps": raw.get("norm_eps")}, fields.where)
    attention, conv, mlp = read_lfm2_attention(fields), read_short_conv(fields), _read_mlp(fields)
    layers = [lfm2_layer(fields, attention if is_full else conv, mlp) for is_full in _kinds(fields)]
    return read_decoder(fields, layers, norm=_norm(fields, "model.embedding_norm"))


def read_lfm2_attention(fields: ConfigFields) -> AttentionSpec:
    """Raises: CheckpointError."""
    norms = QueryKeyNorms(_norm(fields, "").eps, "self_attn.q_layernorm", "self_attn.k_layernorm")
    return replace(read_attention(fields, norms=norms), output="self_attn.out_proj")


def read_short_conv(fields: ConfigFields) -> ShortConvSpec:
    """Raises: CheckpointError."""
    taps = fields.integer("conv_L_cache", 2, 64)
    return ShortConvSpec(read_hidden_size(fields), taps, fields.flag("conv_bias"))


def lfm2_layer(
    fields: ConfigFields, mixer: AttentionSpec | ShortConvSpec, mlp: GatedMLPSpec
) -> LayerPlan:
    """A mixer and a feed-forward, each after its own norm."""
    places = (
        Place(_norm(fields, "operator_norm"), mixer),
        Place(_norm(fields, "ffn_norm"), mlp),
    )
    return LayerPlan(places, read_hidden_size(fields))


def _kinds(fields: ConfigFields) -> list[bool]:
    """Of each layer whether it is attention: by `layer_types`, or those of `full_attn_idxs`."""
    num_layers = read_num_layers(fields)
    found = fields.choices("layer_types", (FULL, _CONV), num_layers)
    if found is not None:
        return [each == FULL for each in found]
    full = fields.raw.get("full_attn_idxs")
    if full is None:
        return [True] * num_layers
    if not isinstance(full, list) or not all(each in range(num_layers) for each in full):
        fields.fail("full_attn_idxs", f"a list of layers below {num_layers}")
    return [i in full for i in range(num_layers)]


def _read_mlp(fields: ConfigFields) -> GatedMLPSpec:
    """The feed-forward, whose inner size the config gives before it is adjusted."""
    mlp = replace(read_gated_mlp(fields), names=_NAMES)
    if not fields.flag("block_auto_adjust_ff_dim"):
        return mlp
    factor = fields.number("block_ffn_dim_multiplier", 0.0, 64.0, default=1.0)
    multiple = fields.integer("block_multiple_of", 1, 1 << 20)
    inner_size = int(factor * int(2 * mlp.inner_size / 3))
    return replace(mlp, inner_size=-(-inner_size // multiple) * multiple)


def _norm(fields: ConfigFields, name: str) -> NormSpec:
    return NormSpec(name, fields.number("norm_eps", 0.0, 1.0))
