"""ERNIE 4.5 dense: as Llama, with rotary pairs side by side, and biases where the config says."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    read_attention,
    read_gated_mlp,
    read_uniform_decoder,
)


def read_ernie45(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    has_bias = fields.flag("use_bias")
    attention = read_attention(fields, has_bias=has_bias)
    attention = replace(attention, rope=replace(attention.rope, is_interleaved=True))
    return read_uniform_decoder(fields, attention, read_gated_mlp(fields, has_bias=has_bias))
