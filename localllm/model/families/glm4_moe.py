"""GLM-4 with experts: chosen by a sigmoid with a correction, beside a feed-forward that all rows
share; the first layers have none.
"""

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import QueryKeyNorms
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.blocks.router import Groups, RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    pre_norm_layer,
    read_attention,
    read_decoder,
    read_eps,
    read_expert,
    read_gated_mlp,
    read_num_experts,
    read_num_layers,
)
from localllm.model.families.qwen_moe import EXPERT_NAMES

_OWN = "mlp.shared_experts."
_SHARED = (f"{_OWN}gate_proj", f"{_OWN}up_proj", f"{_OWN}down_proj")


def read_glm4_moe(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError."""
    norms = QueryKeyNorms(read_eps(fields)) if fields.flag("use_qk_norm") else None
    attention = read_attention(fields, qkv_bias=fields.flag("attention_bias"), norms=norms)
    num_experts, top_k = read_num_experts(fields, "n_routed_experts")
    count = fields.integer("n_group", 1, num_experts // 2)
    if num_experts % count:
        fields.fail("n_group", f"a divisor of n_routed_experts ({num_experts})")
    router = RouterSpec(
        num_experts,
        top_k,
        is_sigmoid=True,
        renormalises=fields.flag("norm_topk_prob", default=True),
        factor=fields.number("routed_scaling_factor", 0.0, 1e6, default=1.0),
        groups=None if count == 1 else Groups(count, fields.integer("topk_group", 1, count)),
        correction="mlp.gate.e_score_correction_bias",
    )
    expert = read_expert(fields, "moe_intermediate_size", EXPERT_NAMES)
    num_shared = fields.integer("n_shared_experts", 1, 64)
    wide = {**fields.raw, "shared_size": num_shared * expert.inner_size}
    shared = read_expert(ConfigFields(wide, fields.where), "shared_size", _SHARED)
    num_layers = read_num_layers(fields)
    num_dense = fields.integer("first_k_dense_replace", 0, num_layers)
    dense = pre_norm_layer(fields, attention, read_gated_mlp(fields))
    sparse = pre_norm_layer(fields, attention, ExpertsSpec(expert, router), shared)
    return read_decoder(fields, [dense] * num_dense + [sparse] * (num_layers - num_dense))
