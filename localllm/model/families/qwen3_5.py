"""Qwen3-Next, and Qwen3.5, 3.6 and 3.8: a gated delta net in three of four layers, and attention
with a gate and a partial rotation in the others; dense or with experts.
"""

from dataclasses import replace

from localllm.model.architecture import FINAL_NORM, Architecture
from localllm.model.blocks.attention import AttentionSpec, QueryKeyNorms
from localllm.model.blocks.block import BlockSpec
from localllm.model.blocks.delta_net import (
    PARTS,
    WHOLE,
    WHOLE_FACTORS,
    DeltaNetNames,
    DeltaNetSpec,
)
from localllm.model.blocks.experts import ExpertsSpec, StackedNames
from localllm.model.blocks.router import RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_expert,
    read_gated_mlp,
    read_kinds,
)
from localllm.model.families.qwen_moe import EXPERT_NAMES, read_dense_layers, read_gated_expert
from localllm.model.norm import NormSpec

_LINEAR = "linear_attention"


def read_qwen3_5(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    mlp = (read_gated_mlp(fields),)
    return _read(fields, [mlp] * fields.num_layers())


def read_qwen3_5_moe(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    return _read(fields, [_read_experts(fields)] * fields.num_layers())


def read_qwen3_next(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    experts, mlp = _read_experts(fields), (read_gated_mlp(fields),)
    every = fields.integer("decoder_sparse_step", 1, 1024, default=1)
    kept = read_dense_layers(fields)
    is_dense = [i in kept or (i + 1) % every > 0 for i in range(fields.num_layers())]
    # As they are in GGUF files.
    names = WHOLE_FACTORS if fields.flag("linear_inputs_are_split") else WHOLE
    return _read(fields, [mlp if each else experts for each in is_dense], names)


def _read(
    fields: ConfigFields, seconds: list[tuple[BlockSpec, ...]], names: DeltaNetNames = PARTS
) -> Architecture:
    """A decoder with the blocks of `seconds`, over the same input, after each layer's mixer."""
    eps = fields.eps()
    attention = _read_attention(fields, eps)
    is_tiled = fields.flag("value_heads_are_tiled")  # of GGUF files
    delta_net = replace(read_delta_net(fields, eps), names=names, is_tiled=is_tiled)
    norm = NormSpec(FINAL_NORM, eps, offset=1.0)
    layers = []
    for kind, blocks in zip(_kinds(fields), seconds, strict=True):
        mixer = delta_net if kind == _LINEAR else attention
        layers.append(pre_norm_layer(fields, mixer, *blocks, norm=norm))
    return read_decoder(fields, layers, norm=norm)


def _read_attention(fields: ConfigFields, eps: float) -> AttentionSpec:
    has_bias = fields.flag("attention_bias")
    fields.only("attn_output_gate", True)
    if fields.get("partial_rotary_factor") is None:
        fields = fields.changed({"partial_rotary_factor": 0.25})
    norms = QueryKeyNorms(eps, offset=1.0)
    attention = read_attention(fields, has_bias=has_bias, norms=norms)
    return replace(attention, linears=replace(attention.linears, has_gate=True))


def read_delta_net(fields: ConfigFields, eps: float) -> DeltaNetSpec:
    """`eps`: of its norm. Raises: CheckpointError."""
    num_keys = fields.integer("linear_num_key_heads", 1, 4096)
    num_values = fields.integer("linear_num_value_heads", 1, 4096)
    if num_values % num_keys:
        fields.fail("linear_num_value_heads", f"a multiple of linear_num_key_heads ({num_keys})")
    return DeltaNetSpec(
        fields.hidden_size(),
        num_keys,
        num_values,
        fields.integer("linear_key_head_dim", 1, 1024),
        fields.integer("linear_value_head_dim", 1, 1024),
        fields.integer("linear_conv_kernel_dim", 2, 64),
        eps,
    )


def _read_experts(fields: ConfigFields) -> tuple[BlockSpec, ...]:
    router = RouterSpec(
        *fields.num_experts(), renormalises=fields.flag("norm_topk_prob", default=True)
    )
    expert = read_expert(fields, "moe_intermediate_size", EXPERT_NAMES)
    # Qwen3.5's own files hold the experts stacked; Qwen3-Next's, and quantized ones, do not.
    stacked = StackedNames("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    experts = ExpertsSpec(expert, router, stacked=stacked)
    return experts, read_gated_expert(fields)


def _kinds(fields: ConfigFields) -> list[str]:
    """The kind of each layer: by `layer_types`, else attention in one of so many."""

    def usual(index: int) -> str:
        every = fields.integer("full_attention_interval", 1, 1024, default=4)
        return _LINEAR if (index + 1) % every else FULL

    return read_kinds(fields, (FULL, _LINEAR), usual)
