"""Ministral 3: as Mistral, with queries that grow with their positions."""

from dataclasses import replace

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import QueryGrowth, Scores
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention, read_gated_mlp, read_uniform_decoder
from localllm.model.rope_config import with_default_rope

# Where config.json names no rotation, as its class has it.
_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def read_ministral3(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    fields = with_default_rope(fields, _ROPE)
    attention = read_attention(fields, window=fields.window())
    asked = ConfigFields(fields.get("rope_parameters"), f"{fields.where}: rope_parameters")
    beta = asked.nonzero_number("llama_4_scaling_beta", 0.0, 1e3)
    if beta is not None:
        growth = QueryGrowth(beta, attention.rope.original_max_position_embeddings)
        attention = replace(attention, scores=Scores(growth=growth))
    return read_uniform_decoder(fields, attention, read_gated_mlp(fields))
