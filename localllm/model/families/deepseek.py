"""DeepSeek V2 and V3: latent attention, and experts in all but the first layers. V3's are chosen by
a sigmoid with a correction, V2's by a softmax; those of the large ones of both in the best groups.
"""

from localllm.model.architecture import Architecture
from localllm.model.blocks.router import RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.latent import read_latent_attention
from localllm.model.families.sigmoid_experts import (
    first_dense,
    read_groups,
    read_mixed_decoder,
    read_sigmoid_router,
)


def read_deepseek_v3(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError, UnsupportedModelError, as `read_latent_attention`."""
    is_interleaved = fields.flag("rope_interleave", default=True)
    attention = read_latent_attention(fields, is_interleaved=is_interleaved)
    router = read_sigmoid_router(fields)
    return read_mixed_decoder(fields, attention, router, _with_experts(fields))


def read_deepseek_v2(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError; UnsupportedModelError for what no published model has."""
    fields.only("topk_method", "greedy", "group_limited_greedy")
    fields.only("scoring_func", "softmax")
    method = fields.get("topk_method")
    if fields.flag("norm_topk_prob"):
        fields.refuse("factors of experts that add up to 1 are")
    if fields.flag("mlp_bias"):
        fields.refuse("a bias of the feed-forward is")
    num_experts, top_k = fields.num_experts("n_routed_experts")
    has_groups = method == "group_limited_greedy"
    router = RouterSpec(
        num_experts,
        top_k,
        factor=fields.routed_factor(),
        groups=read_groups(fields, num_experts, top_k, best=1) if has_groups else None,
    )
    # Its code knows no other order of pairs, whatever a config says of one.
    attention = read_latent_attention(fields, is_interleaved=True)
    return read_mixed_decoder(fields, attention, router, _with_experts(fields))


def _with_experts(fields: ConfigFields) -> list[bool]:
    fields.only("moe_layer_freq", 1)
    return first_dense(fields)
