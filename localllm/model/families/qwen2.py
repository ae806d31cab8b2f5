"""Qwen2 and Qwen2.5: biases on query, key and value; windows on the later layers, if enabled."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_opt_in_windows,
)


def read_qwen2(fields: ConfigFields) -> Architecture:
    """Read a Qwen2 config. Raises: CheckpointError."""
    return read_qwen(fields, read_attention(fields, qkv_bias=True))


def read_qwen(fields: ConfigFields, attention: AttentionSpec) -> Architecture:
    """A decoder with this attention and a Qwen config's windows. Raises: CheckpointError."""
    mlp = read_gated_mlp(fields)
    layers = [
        pre_norm_layer(fields, replace(attention, window=window), mlp)
        for window in read_opt_in_windows(fields)
    ]
    return read_decoder(fields, layers)
