"""Qwen2 and Qwen2.5: biases on query, key and value; windows on the later layers, if enabled."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    SLIDING,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_kinds,
)


def read_qwen2(fields: ConfigFields) -> Architecture:
    """Read a Qwen2 config. Raises: CheckpointError."""
    return read_qwen(fields, read_attention(fields, qkv_bias=True))


def read_qwen(fields: ConfigFields, attention: AttentionSpec) -> Architecture:
    """A decoder with this attention; where `use_sliding_window` enables windows, layers have them
    by `layer_types`, or from layer `max_window_layers` on. Raises: CheckpointError.
    """
    mlp, window, is_used = (
        read_gated_mlp(fields),
        fields.window(),
        fields.flag("use_sliding_window"),
    )
    first = fields.optional_integer("max_window_layers", 0, 1024) or 0
    kinds = read_kinds(fields, (FULL, SLIDING), lambda i: SLIDING if i >= first else FULL)
    windows = [window if is_used and kind == SLIDING else None for kind in kinds]
    layers = [pre_norm_layer(fields, replace(attention, window=each), mlp) for each in windows]
    return read_decoder(fields, layers)
