"""SmolLM3: as Llama, but some layers, every fourth by default, are not rotated."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    SLIDING,
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
)
from localllm.model.rope_config import NO_ROPE


def read_smollm3(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    attention = read_attention(fields, has_bias=fields.flag("attention_bias"))
    mlp = read_gated_mlp(fields, has_bias=fields.flag("mlp_bias"))
    layers, rotated = [], _rotated(fields)
    for window, is_rotated in zip(_windows(fields, rotated), rotated, strict=True):
        rope = attention.rope if is_rotated else NO_ROPE
        own = replace(attention, window=window, rope=rope)
        layers.append(pre_norm_layer(fields, own, mlp))
    return read_decoder(fields, layers)


def _windows(fields: ConfigFields, rotated: tuple[int, ...]) -> list[int | None]:
    """The window of each layer: if enabled, of those in `layer_types`, else where nothing turns."""
    kinds = fields.choices("layer_types", (FULL, SLIDING), len(rotated))
    if kinds is None:
        is_used = fields.flag("use_sliding_window")
        kinds = tuple(FULL if each or not is_used else SLIDING for each in rotated)
    return [fields.window() if kind == SLIDING else None for kind in kinds]


def _rotated(fields: ConfigFields) -> tuple[int, ...]:
    """1 for each layer with rotary embedding, else 0 (`no_rope_layers`, despite its name)."""
    num_layers = fields.num_layers()
    interval = fields.integer("no_rope_layer_interval", 1, 1024, default=4)
    as_it_comes = tuple(int((i + 1) % interval > 0) for i in range(num_layers))
    return fields.integers("no_rope_layers", 0, 1, num_layers) or as_it_comes
