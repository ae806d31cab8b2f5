"""Qwen2 and Qwen2.5: biases on query, key and value; windows on the later layers, if asked for."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_num_layers,
    read_window,
)


def read_qwen2(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    return read_qwen(fields, read_attention(fields, qkv_bias=True))


def read_qwen(fields: ConfigFields, attention: AttentionSpec) -> Architecture:
    """A decoder whose layers have this attention, with the windows of the Qwen configs.

    Raises: CheckpointError.
    """
    mlp = read_gated_mlp(fields)
    layers = [
        pre_norm_layer(fields, replace(attention, window=window), mlp)
        for window in _read_windows(fields)
    ]
    return read_decoder(fields, layers)


def _read_windows(fields: ConfigFields) -> list[int | None]:
    """The window of each layer: by `layer_types`, or from `max_window_layers` on."""
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)
    num_layers = read_num_layers(fields)
    window, is_used = read_window(fields), fields.flag("use_sliding_window")
    kinds = ("full_attention", "sliding_attention")
    layer_types = fields.choices("layer_types", kinds, num_layers)
    first = fields.optional_integer("max_window_layers", 0, 1024) or 0
    if layer_types is None:
        layer_types = tuple(kinds[i >= first] for i in range(num_layers))
    return [window if is_used and kind == kinds[1] else None for kind in layer_types]
