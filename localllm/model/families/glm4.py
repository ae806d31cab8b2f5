"""GLM-4: norms before and after each block, and pairs side by side in the first half of a head."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.gated_mlp import WHOLE
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    read_attention,
    read_decoder,
    read_gated_mlp,
    sandwich_layer,
)

_NORMS = (
    "input_layernorm",
    "post_self_attn_layernorm",
    "post_attention_layernorm",
    "post_mlp_layernorm",
)


def read_glm4(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    attention = read_attention(fields, qkv_bias=fields.flag("attention_bias"))
    attention = replace(attention, rope=replace(attention.rope, is_interleaved=True))
    mlp = replace(read_gated_mlp(fields), names=WHOLE)
    layer = sandwich_layer(fields, attention, mlp, _NORMS)
    return read_decoder(fields, [layer] * fields.num_layers())
