"""Granite 3 and 4 dense: as Llama, with multipliers of embeddings, scores, blocks and logits."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_num_layers,
)

_LOW, _HIGH = 0.0, 1e6


def read_granite(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    has_bias = fields.flag("attention_bias")
    attention = replace(
        read_attention(fields, qkv_bias=has_bias, o_bias=has_bias),
        scale=fields.number("attention_multiplier", _LOW, _HIGH, default=1.0),
    )
    mlp = read_gated_mlp(fields, has_bias=fields.flag("mlp_bias"))
    scale = fields.number("residual_multiplier", _LOW, _HIGH, default=1.0)
    layer = pre_norm_layer(fields, attention, mlp, scale=scale)
    return read_decoder(
        fields,
        [layer] * read_num_layers(fields),
        embedding_scale=fields.number("embedding_multiplier", _LOW, _HIGH, default=1.0),
        logit_scale=1 / fields.number("logits_scaling", 1e-6, _HIGH, default=1.0),
    )
