"""EXAONE 4: norms after the blocks and on each head; where layers have windows, those without one
are not rotated.
"""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import QueryKeyNorms
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    post_norm_layer,
    read_attention,
    read_decoder,
    read_gated_mlp,
    read_windowed_layers,
)
from localllm.model.rope_config import NO_ROPE


def read_exaone4(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    rotated = read_attention(fields, norms=QueryKeyNorms(fields.eps()))
    mlp, window = read_gated_mlp(fields), fields.window()
    pattern = _pattern(fields) if window is not None else 1
    layers = []
    for is_windowed in read_windowed_layers(fields, pattern):
        own = replace(rotated, window=window) if is_windowed else replace(rotated, rope=NO_ROPE)
        layers.append(post_norm_layer(fields, rotated if window is None else own, mlp))
    return read_decoder(fields, layers)


def _pattern(fields: ConfigFields) -> int:
    """Every how many layers one has no window; the checkpoints spell 4 as "LLLG"."""
    value = fields.get("sliding_window_pattern")
    if isinstance(value, str) and value == "L" * (len(value) - 1) + "G":
        return len(value)
    return fields.integer("sliding_window_pattern", 1, 1024)
