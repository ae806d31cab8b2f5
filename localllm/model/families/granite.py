"""Granite 3 and 4: as Llama, with multipliers of embeddings, scores, blocks and logits, and with
experts too; Granite 4 with Mamba-2 in place of most attentions.
"""

from collections.abc import Sequence
from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec, Scores
from localllm.model.blocks.experts import ExpertsSpec, StackedNames
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.mamba import MambaSpec
from localllm.model.blocks.router import RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_kinds,
    refuse_step_limits,
)
from localllm.model.rope_config import NO_ROPE

_LOW, _HIGH = 0.0, 1e6
_LINEAR = "linear_attention"
_EXPERT = "block_sparse_moe.experts.{}."
_EXPERT_NAMES = (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj", f"{_EXPERT}down_proj")
_SHARED = ("shared_mlp.input_linear", "shared_mlp.output_linear")
# Of GGUF files.
_SHARED_PARTS = ("shared_mlp.gate_proj", "shared_mlp.up_proj", "shared_mlp.down_proj")


def read_granite(fields: ConfigFields) -> Architecture:
    """Granite 3. Raises: CheckpointError."""
    return _read_granite(fields, read_gated_mlp(fields, has_bias=fields.flag("mlp_bias")))


def read_granite_moe(fields: ConfigFields) -> Architecture:
    """Granite 3 with experts. Raises: CheckpointError."""
    return _read_granite(fields, _read_experts(fields))


def read_granite4(fields: ConfigFields) -> Architecture:
    """Attention or Mamba-2, a shared feed-forward, maybe experts. Raises: CheckpointError."""
    fields.only("normalization_function", "rmsnorm")
    kinds = read_kinds(fields, (FULL, _LINEAR), lambda i: _LINEAR)
    inner_size = fields.integer("shared_intermediate_size", 1, 1 << 22)
    names = _SHARED_PARTS if fields.flag("shared_mlp_is_split") else _SHARED
    shared = replace(read_gated_mlp(fields), inner_size=inner_size, names=names)
    has_experts = fields.integer("num_local_experts", 0, 1 << 16) > 0
    is_rotated = fields.get("position_embedding_type") == "rope"
    attention = _read_attention(fields, is_rotated=is_rotated)
    mamba = _read_mamba(fields) if _LINEAR in kinds else None
    mixers = [mamba if kind == _LINEAR else attention for kind in kinds]
    feed_forward = (_read_experts(fields), shared) if has_experts else (shared,)
    return _read_decoder(fields, [each for each in mixers if each is not None], *feed_forward)


def _read_mamba(fields: ConfigFields) -> MambaSpec:
    hidden_size = fields.hidden_size()
    num_heads = fields.integer("mamba_n_heads", 1, 1 << 16, default=128)
    inner_size = hidden_size * fields.integer("mamba_expand", 1, 1024, default=2)
    if inner_size % num_heads:
        fields.fail("mamba_n_heads", f"a divisor of {inner_size}")
    width = inner_size // num_heads
    if fields.get("mamba_d_head", "auto") not in ("auto", width):
        fields.fail("mamba_d_head", f"{width}, so that all heads have {inner_size} values")
    num_groups = fields.integer("mamba_n_groups", 1, num_heads, default=1)
    if num_heads % num_groups:
        fields.fail("mamba_n_groups", f"a divisor of mamba_n_heads ({num_heads})")
    refuse_step_limits(fields)
    return MambaSpec(
        hidden_size,
        num_heads,
        width,
        num_groups,
        fields.integer("mamba_d_state", 1, 1 << 16, default=256),
        fields.integer("mamba_d_conv", 2, 64, default=4),
        fields.eps(),
        has_bias=fields.flag("mamba_proj_bias"),
        has_conv_bias=fields.flag("mamba_conv_bias", default=True),
    )


def _read_experts(fields: ConfigFields) -> ExpertsSpec:
    router = RouterSpec(
        *fields.num_experts("num_local_experts"),
        linear="block_sparse_moe.router.layer",
        renormalises=True,
    )
    return ExpertsSpec(
        replace(read_gated_mlp(fields), names=_EXPERT_NAMES),
        router,
        stacked=StackedNames("block_sparse_moe.input_linear", "block_sparse_moe.output_linear"),
    )


def _read_granite(fields: ConfigFields, mlp: GatedMLPSpec | ExpertsSpec) -> Architecture:
    return _read_decoder(fields, [_read_attention(fields)] * fields.num_layers(), mlp)


def _read_attention(fields: ConfigFields, *, is_rotated: bool = True) -> AttentionSpec:
    attention = replace(
        read_attention(fields, has_bias=fields.flag("attention_bias")),
        scores=Scores(fields.number("attention_multiplier", _LOW, _HIGH, default=1.0)),
    )
    return attention if is_rotated else replace(attention, rope=NO_ROPE)


def _read_decoder(
    fields: ConfigFields,
    mixers: Sequence[AttentionSpec | MambaSpec],
    mlp: GatedMLPSpec | ExpertsSpec,
    shared: GatedMLPSpec | None = None,
) -> Architecture:
    """A decoder with the same feed-forward after each of `mixers`."""
    scale = fields.number("residual_multiplier", _LOW, _HIGH, default=1.0)
    return read_decoder(
        fields,
        [pre_norm_layer(fields, mixer, mlp, shared, scale=scale) for mixer in mixers],
        embedding_scale=fields.number("embedding_multiplier", _LOW, _HIGH, default=1.0),
        logit_scale=1 / fields.number("logits_scaling", 1e-6, _HIGH, default=1.0),
    )
