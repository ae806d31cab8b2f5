"""Qwen2 and Qwen3 with experts: in all layers but those that the config names; Qwen2's have a
feed-forward beside them that all rows share, with a gate of its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec, QueryKeyNorms
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.router import RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    SLIDING,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_expert,
    read_gated_mlp,
)

_EXPERT, _OWN = "mlp.experts.{}.", "mlp.shared_expert."
EXPERT_NAMES = (f"{_EXPERT}gate_proj", f"{_EXPERT}up_proj", f"{_EXPERT}down_proj")
_SHARED_NAMES = (f"{_OWN}gate_proj", f"{_OWN}up_proj", f"{_OWN}down_proj")


def read_qwen2_moe(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    has_bias = fields.flag("qkv_bias", default=True)
    num_layers = fields.num_layers()
    kinds = fields.choices("layer_types", (FULL, SLIDING), num_layers)
    if kinds is None:
        first = fields.integer("max_window_layers", 0, 1024)
        kinds = tuple(SLIDING if i < first and i % 2 == 0 else FULL for i in range(num_layers))
    window = _window(fields)
    windows = [window if kind == SLIDING else None for kind in kinds]
    attention, shared = read_attention(fields, qkv_bias=has_bias), read_gated_expert(fields)
    return _read_qwen_moe(fields, attention, windows, shared)


def read_qwen3_moe(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    attention = read_attention(
        fields, has_bias=fields.flag("attention_bias"), norms=QueryKeyNorms(fields.eps())
    )
    windows = [_window(fields)] * fields.num_layers()
    return _read_qwen_moe(fields, attention, windows)


def _window(fields: ConfigFields) -> int | None:
    return fields.window() if fields.flag("use_sliding_window") else None


def _read_qwen_moe(
    fields: ConfigFields,
    attention: AttentionSpec,
    windows: Sequence[int | None],
    shared: GatedMLPSpec | None = None,
) -> Architecture:
    router = RouterSpec(*fields.num_experts(), renormalises=fields.flag("norm_topk_prob"))
    experts = ExpertsSpec(read_expert(fields, "moe_intermediate_size", EXPERT_NAMES), router)
    dense = read_gated_mlp(fields)
    every = fields.integer("decoder_sparse_step", 1, 1024, default=1)
    kept = read_dense_layers(fields)
    layers = []
    for i, window in enumerate(windows):
        own = replace(attention, window=window)
        if i in kept or (i + 1) % every:
            layers.append(pre_norm_layer(fields, own, dense))
        else:
            layers.append(pre_norm_layer(fields, own, experts, shared))
    return read_decoder(fields, layers)


def read_gated_expert(fields: ConfigFields) -> GatedMLPSpec:
    """The feed-forward beside experts, with a gate for each row. Raises: CheckpointError."""
    shared = read_expert(fields, "shared_expert_intermediate_size", _SHARED_NAMES)
    return replace(shared, row_gate="mlp.shared_expert_gate")


def read_dense_layers(fields: ConfigFields) -> list[int]:
    """The layers without experts, by index. Raises: CheckpointError."""
    found = fields.get("mlp_only_layers") or []
    if not isinstance(found, list) or not all(type(each) is int for each in found):
        fields.fail("mlp_only_layers", "a list of whole numbers")
    return found
