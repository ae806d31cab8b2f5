"""OLMoE: one norm each over all query heads and all key heads, and experts in every layer."""

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import QueryKeyNorms
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.blocks.router import RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import read_attention, read_expert, read_uniform_decoder
from localllm.model.families.qwen_moe import EXPERT_NAMES


def read_olmoe(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    fields.only("clip_qkv")
    norms = QueryKeyNorms(fields.eps(), is_whole=True)
    attention = read_attention(fields, has_bias=fields.flag("attention_bias"), norms=norms)
    router = RouterSpec(*fields.num_experts(), renormalises=fields.flag("norm_topk_prob"))
    experts = ExpertsSpec(read_expert(fields, "intermediate_size", EXPERT_NAMES), router)
    return read_uniform_decoder(fields, attention, experts)
