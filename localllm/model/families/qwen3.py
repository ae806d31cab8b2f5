"""Qwen3: like Qwen2, with a norm on each query and key head, and biases as the config says."""

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import QueryKeyNorms
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention
from localllm.model.families.qwen2 import read_qwen


def read_qwen3(fields: ConfigFields) -> Architecture:
    """Read a Qwen3 config. Raises: CheckpointError."""
    norms = QueryKeyNorms(fields.eps())
    attention = read_attention(fields, has_bias=fields.flag("attention_bias"), norms=norms)
    return read_qwen(fields, attention)
