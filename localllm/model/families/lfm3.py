"""LFM3: LFM2's convolutions with more taps, windows in every second attention, a gate on each of
its heads, and norms after the blocks too.
"""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec, QueryKeyNorms
from localllm.model.blocks.short_conv import ShortConvSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    SLIDING,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_kinds,
    sandwich_layer,
)
from localllm.model.families.lfm2 import (
    CONV,
    LAST_NORM,
    MLP_NAMES,
    read_short_conv,
)
from localllm.model.layer import LayerPlan
from localllm.model.norm import NormSpec
from localllm.model.rope_config import read_rope


def read_lfm3(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    eps, positions = fields.eps(), fields.max_positions()
    has_bias = fields.flag("attention_bias")
    attention = read_attention(fields, has_bias=has_bias, norms=QueryKeyNorms(eps))
    if fields.flag("use_attention_gate", default=True):
        linears = replace(attention.linears, head_gate="self_attn.g_proj")
        attention = replace(attention, linears=linears)
    mixers: dict[str, AttentionSpec | ShortConvSpec] = {
        CONV: read_short_conv(fields),
        FULL: replace(attention, rope=read_rope(fields, positions, FULL)),
        SLIDING: replace(
            attention, rope=read_rope(fields, positions, SLIDING), window=fields.window()
        ),
    }
    mlp = replace(read_gated_mlp(fields), names=MLP_NAMES)
    names = ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm")
    is_sandwiched = fields.flag("use_sandwich_norm", default=True)

    def layer(mixer: AttentionSpec | ShortConvSpec) -> LayerPlan:
        if is_sandwiched:
            return sandwich_layer(fields, mixer, mlp, names)
        return pre_norm_layer(fields, mixer, mlp, names=names[::2])

    layers = [layer(mixers[kind]) for kind in _kinds(fields)]
    return read_decoder(fields, layers, norm=NormSpec(LAST_NORM, eps))


def _kinds(fields: ConfigFields) -> list[str]:
    """The kind of each layer: by `layer_types`, or with every second one a convolution."""
    usual = (SLIDING, CONV, FULL, CONV)
    return read_kinds(fields, (FULL, SLIDING, CONV), lambda i: usual[i % 4] if i else CONV)
