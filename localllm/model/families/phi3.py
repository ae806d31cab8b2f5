"""Phi-3, 3.5 and 4: as Llama, with one linear each for query, key and value and for gate and up."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.gated_mlp import WHOLE
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention, read_gated_mlp, read_uniform_decoder


def read_phi3(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    fields = _with_longrope(fields)
    attention = read_attention(fields, window=fields.window())
    attention = replace(attention, linears=replace(attention.linears, is_whole=True))
    mlp = replace(read_gated_mlp(fields), names=WHOLE)
    return read_uniform_decoder(fields, attention, mlp)


def _with_longrope(fields: ConfigFields) -> ConfigFields:
    """The config with longrope under its name; the first files called it "yarn"."""
    renamed = {}
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.get(name)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) == "yarn":
            renamed[name] = {**rope, "rope_type": "longrope"}
    return fields.changed(renamed)
