"""Granite 3 and 4: as Llama, with multipliers of embeddings, scores, blocks and logits; Granite 3
with experts too.
"""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.experts import ExpertsSpec, StackedNames
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.router import RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_num_experts,
    read_num_layers,
)
from localllm.model.rope_config import NO_ROPE

_LOW, _HIGH = 0.0, 1e6
_EXPERT = "block_sparse_moe.experts.{}."
_EXPERT_NAMES = (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj", f"{_EXPERT}down_proj")


def read_granite(fields: ConfigFields) -> Architecture:
    """Granite 3. Raises: CheckpointError."""
    return _read_granite(fields, read_gated_mlp(fields, has_bias=fields.flag("mlp_bias")))


def read_granite_moe(fields: ConfigFields) -> Architecture:
    """Granite 3 with experts. Raises: CheckpointError."""
    router = RouterSpec(
        *read_num_experts(fields, "num_local_experts"),
        linear="block_sparse_moe.router.layer",
        renormalises=True,
    )
    experts = ExpertsSpec(
        replace(read_gated_mlp(fields), names=_EXPERT_NAMES),
        router,
        stacked=StackedNames("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    )
    return _read_granite(fields, experts)


def read_granite4(fields: ConfigFields) -> Architecture:
    """Granite 4 of layers with attention and without experts, whose feed-forwards are the shared
    ones. Raises: CheckpointError, UnsupportedModelError.
    """
    kinds = fields.choices(
        "layer_types", ("attention", FULL, "mamba", "linear_attention"), read_num_layers(fields)
    )
    if kinds is None or not set(kinds) <= {"attention", FULL}:
        fields.refuse("layers of Mamba are")
    if fields.integer("num_local_experts", 0, 1 << 16):
        fields.refuse("mixtures of experts are")
    inner_size = fields.integer("shared_intermediate_size", 1, 1 << 22)
    mlp = replace(
        read_gated_mlp(fields),
        inner_size=inner_size,
        names=("shared_mlp.input_linear", "shared_mlp.output_linear"),
    )
    return _read_granite(
        fields, mlp, is_rotated=fields.raw.get("position_embedding_type") == "rope"
    )


def _read_granite(
    fields: ConfigFields, mlp: GatedMLPSpec | ExpertsSpec, *, is_rotated: bool = True
) -> Architecture:
    has_bias = fields.flag("attention_bias")
    attention = replace(
        read_attention(fields, qkv_bias=has_bias, o_bias=has_bias),
        scale=fields.number("attention_multiplier", _LOW, _HIGH, default=1.0),
    )
    if not is_rotated:
        attention = replace(attention, rope=NO_ROPE)
    scale = fields.number("residual_multiplier", _LOW, _HIGH, default=1.0)
    layer = pre_norm_layer(fields, attention, mlp, scale=scale)
    return read_decoder(
        fields,
        [layer] * read_num_layers(fields),
        embedding_scale=fields.number("embedding_multiplier", _LOW, _HIGH, default=1.0),
        logit_scale=1 / fields.number("logits_scaling", 1e-6, _HIGH, default=1.0),
    )
