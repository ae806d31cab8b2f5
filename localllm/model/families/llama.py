"""Llama, and the many models under its name: biases as the config says, no windows."""

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_num_layers,
)


def read_llama(fields: ConfigFields) -> Architecture:
    """Read a Llama config. Raises: CheckpointError."""
    has_bias = fields.flag("attention_bias")
    attention = read_attention(fields, qkv_bias=has_bias, o_bias=has_bias)
    mlp = read_gated_mlp(fields, has_bias=fields.flag("mlp_bias"))
    layer = pre_norm_layer(fields, attention, mlp)
    return read_decoder(fields, [layer] * read_num_layers(fields))
