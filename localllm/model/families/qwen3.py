"""Qwen3: as Qwen2, with a norm on each query and key head, and biases where the config says."""

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention
from localllm.model.families.qwen2 import read_qwen


def read_qwen3(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    has_bias = fields.flag("attention_bias")
    attention = read_attention(fields, qkv_bias=has_bias, o_bias=has_bias, has_head_norms=True)
    return read_qwen(fields, attention)
