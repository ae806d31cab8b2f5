"""Cohere 2 (Command R7B, Command A): one norm with the mean taken out for both blocks of a layer,
which compute in parallel; three of four layers have a window and rotation, the others neither.
"""

from dataclasses import replace

from localllm.model.architecture import FINAL_NORM, Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_windowed_layers,
)
from localllm.model.layer import LayerPlan, Place
from localllm.model.norm import NormSpec
from localllm.model.rope_config import NO_ROPE


def read_cohere2(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    has_bias, eps = fields.flag("attention_bias"), fields.number("layer_norm_eps", 0, 1)
    full = read_attention(fields, has_bias=has_bias)
    window, rope = fields.window(), replace(full.rope, is_interleaved=True)
    full = replace(full, rope=NO_ROPE)
    windowed = full if window is None else replace(full, rope=rope, window=window)
    mlp, norm = read_gated_mlp(fields), NormSpec("input_layernorm", eps, is_centred=True)
    layers = []
    for is_windowed in read_windowed_layers(
        fields, fields.integer("sliding_window_pattern", 1, 1024, default=4)
    ):
        attention = windowed if is_windowed else full
        places = (Place(norm, attention, shares_input=True), Place(None, mlp))
        layers.append(LayerPlan(places, fields.hidden_size()))
    return read_decoder(
        fields,
        layers,
        norm=NormSpec(FINAL_NORM, eps, is_centred=True),
        logit_scale=fields.number("logit_scale", 0.0, 1e6),
    )
