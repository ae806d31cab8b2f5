"""Seed-OSS: as Llama, with biases of query, key and value apart from that of the output."""

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    read_attention,
    read_gated_mlp,
    read_uniform_decoder,
)


def read_seed_oss(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    attention = read_attention(
        fields, qkv_bias=fields.flag("attention_bias"), o_bias=fields.flag("attention_out_bias")
    )
    mlp = read_gated_mlp(fields, has_bias=fields.flag("mlp_bias"))
    return read_uniform_decoder(fields, attention, mlp)
