"""OLMo 2: norms after the blocks, and one norm each over all query heads and all key heads."""

from collections.abc import Sequence

from localllm.model.architecture import FINAL_NORM, Architecture
from localllm.model.blocks.attention import AttentionSpec, QueryKeyNorms
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    post_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
)
from localllm.model.norm import NormSpec


def read_olmo2(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    return read_olmo(fields, [read_olmo_attention(fields)] * fields.num_layers())


def read_olmo(fields: ConfigFields, attentions: Sequence[AttentionSpec]) -> Architecture:
    """A decoder around the attention of each layer. Raises: CheckpointError."""
    mlp, norm = read_gated_mlp(fields), NormSpec(FINAL_NORM, fields.eps(), rounds_last=True)
    layers = [post_norm_layer(fields, each, mlp, norm) for each in attentions]
    return read_decoder(fields, layers, norm=norm)


def read_olmo_attention(fields: ConfigFields) -> AttentionSpec:
    """Raises: CheckpointError."""
    norms = QueryKeyNorms(fields.eps(), is_whole=True, rounds_last=True)
    return read_attention(fields, has_bias=fields.flag("attention_bias"), norms=norms)
