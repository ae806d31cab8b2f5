"""OLMo 2: norms after the blocks, and one norm each over all query heads and all key heads."""

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec, QueryKeyNorms
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    post_norm_layer,
    read_attention,
    read_decoder,
    read_eps,
    read_gated_mlp,
    read_num_layers,
)


def read_olmo2(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    fields = fields.with_defaults(rms_norm_eps=1e-5)
    layer = post_norm_layer(fields, read_olmo_attention(fields), read_gated_mlp(fields))
    return read_decoder(fields, [layer] * read_num_layers(fields))


def read_olmo_attention(fields: ConfigFields) -> AttentionSpec:
    """Raises: CheckpointError."""
    has_bias = fields.flag("attention_bias")
    norms = QueryKeyNorms(read_eps(fields), is_whole=True)
    return read_attention(fields, qkv_bias=has_bias, o_bias=has_bias, norms=norms)
