"""GLM-4 with experts: the first layers have none."""

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import QueryKeyNorms
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention
from localllm.model.families.sigmoid_experts import (
    first_dense,
    read_mixed_decoder,
    read_sigmoid_router,
)


def read_glm4_moe(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    norms = QueryKeyNorms(fields.eps()) if fields.flag("use_qk_norm") else None
    attention = read_attention(fields, qkv_bias=fields.flag("attention_bias"), norms=norms)
    router = read_sigmoid_router(fields)
    return read_mixed_decoder(fields, attention, router, first_dense(fields))
