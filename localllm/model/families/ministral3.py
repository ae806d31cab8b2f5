"""Ministral 3: as Mistral, with queries that grow with their positions."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import QueryGrowth
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_num_layers,
    read_window,
)


def read_ministral3(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    fields = fields.with_defaults(rms_norm_eps=1e-5, head_dim=128)
    attention = read_attention(fields, window=read_window(fields))
    rope = fields.raw.get("rope_parameters") or {}
    beta = ConfigFields(rope, f"{fields.where}: rope_parameters").optional_number(
        "llama_4_scaling_beta", 0.0, 1e3
    )
    if beta is not None:
        growth = QueryGrowth(beta, attention.rope.original_max_position_embeddings)
        attention = replace(attention, growth=growth)
    layer = pre_norm_layer(fields, attention, read_gated_mlp(fields))
    return read_decoder(fields, [layer] * read_num_layers(fields))
