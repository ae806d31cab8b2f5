"""Mistral 7B and its successors: no biases; a window, if there is one, applies to all layers."""

from localllm.model.architecture import Architecture
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention, read_gated_mlp, read_uniform_decoder


def read_mistral(fields: ConfigFields) -> Architecture:
    """Read a Mistral config. Raises: CheckpointError."""
    attention = read_attention(fields, window=fields.window())
    return read_uniform_decoder(fields, attention, read_gated_mlp(fields))
