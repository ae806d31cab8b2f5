"""Mixtral: as Mistral, with two of eight experts for each row."""

from localllm.model.architecture import Architecture
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.blocks.router import RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention, read_expert, read_uniform_decoder

_EXPERT = "block_sparse_moe.experts.{}."
_NAMES = (f"{_EXPERT}w1", f"{_EXPERT}w3", f"{_EXPERT}w2")


def read_mixtral(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    attention = read_attention(fields, window=fields.window())
    router = RouterSpec(
        *fields.num_experts("num_local_experts"),
        linear="block_sparse_moe.gate",
        renormalises=True,
    )
    expert = read_expert(fields, "intermediate_size", _NAMES)
    return read_uniform_decoder(fields, attention, ExpertsSpec(expert, router))
