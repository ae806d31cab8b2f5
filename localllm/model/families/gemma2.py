"""Gemma 2: norms as Gemma 3's but none on heads, capped scores and logits, and a window in every
second layer.
"""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import Scores
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention, read_gated_mlp, read_windowed_layers
from localllm.model.families.gemma3 import gated_by_hidden_activation, read_gemma_decoder


def read_gemma2(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    fields = gated_by_hidden_activation(fields)
    full = replace(
        read_attention(fields, has_bias=fields.flag("attention_bias")),
        scores=Scores(
            fields.number("query_pre_attn_scalar", 0.0, 1e6) ** -0.5,
            fields.optional_number("attn_logit_softcapping", 0.0, 1e6),
        ),
    )
    windowed = replace(full, window=fields.window())
    attentions = [windowed if each else full for each in read_windowed_layers(fields, every=2)]
    return read_gemma_decoder(fields, attentions, read_gated_mlp(fields))
