"""Llama, and the many models under its name: biases as the config says, no windows."""

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    read_attention,
    read_gated_mlp,
    read_uniform_decoder,
)


def read_llama(fields: ConfigFields) -> Architecture:
    """Read a Llama config. Raises: CheckpointError."""
    attention = read_attention(fields, has_bias=fields.flag("attention_bias"))
    mlp = read_gated_mlp(fields, has_bias=fields.flag("mlp_bias"))
    return read_uniform_decoder(fields, attention, mlp)
