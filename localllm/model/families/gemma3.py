"""Gemma 3's text model: a norm before and after each block and on each head, whose stored weights
are 1 too small; five of six layers have a window and a rotation of their own.
"""

from collections.abc import Sequence
from dataclasses import replace

from localllm.model.architecture import FINAL_NORM, Architecture
from localllm.model.blocks.attention import AttentionSpec, QueryKeyNorms, Scores
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    SLIDING,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_windowed_layers,
    sandwich_layer,
)
from localllm.model.norm import NormSpec
from localllm.model.rope_config import read_rope

NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)


def read_gemma3(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    fields = gated_by_hidden_activation(fields)
    fields.only("attn_logit_softcapping")
    has_bias, positions = fields.flag("attention_bias"), fields.max_positions()
    norms = QueryKeyNorms(fields.eps(), offset=1.0)
    full = replace(
        read_attention(fields, has_bias=has_bias, norms=norms),
        rope=read_rope(fields, positions, FULL),
        scores=Scores(fields.number("query_pre_attn_scalar", 0.0, 1e6) ** -0.5),
    )
    # The old spelling stretches the full layers alone, and names the others' base.
    local = fields.number("rope_local_base_freq", 1.0, 1e12)
    own = fields.changed({"rope_scaling": None, "rope_theta": local})
    rope = read_rope(own, positions, SLIDING)
    windowed = replace(full, rope=rope, window=fields.window())
    pattern = fields.integer("sliding_window_pattern", 1, 1024, default=6)
    attentions = [windowed if each else full for each in read_windowed_layers(fields, pattern)]
    return read_gemma_decoder(fields, attentions, read_gated_mlp(fields))


def gated_by_hidden_activation(fields: ConfigFields) -> ConfigFields:
    """The config with `hidden_activation` as the gate, whatever the older `hidden_act` says."""
    gate = fields.get("hidden_activation") or "gelu_pytorch_tanh"
    return fields.changed({"hidden_act": gate})


def read_gemma_decoder(
    fields: ConfigFields, attentions: Sequence[AttentionSpec], mlp: GatedMLPSpec
) -> Architecture:
    """A decoder with norms before and after each block. Raises: CheckpointError."""
    fields.only("use_bidirectional_attention", False)
    norm = NormSpec(FINAL_NORM, fields.eps(), offset=1.0)
    return read_decoder(
        fields,
        [sandwich_layer(fields, attention, mlp, NORMS, norm) for attention in attentions],
        norm=norm,
        embedding_scale=fields.hidden_size() ** 0.5,
        logit_cap=fields.optional_number("final_logit_softcapping", 0.0, 1e6),
    )
