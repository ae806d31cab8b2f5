"""Hunyuan dense: as Llama, with norms on each head after the rotation, whose base a fixed factor
stretches.
"""

from dataclasses import replace
from typing import Any

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import QueryKeyNorms
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention, read_gated_mlp, read_uniform_decoder


def read_hunyuan(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    fields, alpha = _without_alpha(fields)
    norms = QueryKeyNorms(
        fields.eps(),
        "self_attn.query_layernorm",
        "self_attn.key_layernorm",
        is_late=True,
    )
    attention = read_attention(fields, has_bias=fields.flag("attention_bias"), norms=norms)
    width = attention.head_dim
    theta = attention.rope.theta * alpha ** (width / (width - 2))
    attention = replace(attention, rope=replace(attention.rope, theta=theta))
    return read_uniform_decoder(fields, attention, read_gated_mlp(fields))


def _without_alpha(fields: ConfigFields) -> tuple[ConfigFields, float]:
    """The config with its "dynamic" rotation called default, and the factor that makes it so."""
    plain, alpha = dict[str, Any](), 1.0
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if isinstance(rope, dict) and rope.get("alpha"):
            alpha = ConfigFields(rope, f"{fields.where}: {name}").number("alpha", 0.0, 1e6)
            plain[name] = {"rope_type": "default"}
            if rope.get("rope_theta") is not None:
                plain[name]["rope_theta"] = rope["rope_theta"]
    return fields.changed(plain), alpha
