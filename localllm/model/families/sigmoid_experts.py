"""Experts chosen by a sigmoid with a correction, beside a feed-forward that all rows share; some of
the layers have none (DeepSeek V3, and GLM from 4.5 on).
"""

from collections.abc import Sequence

from localllm.model.architecture import Architecture
from localllm.model.blocks.block import BlockSpec
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.router import Groups, RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import pre_norm_layer, read_decoder, read_expert, read_gated_mlp
from localllm.model.families.qwen_moe import EXPERT_NAMES

_OWN = "mlp.shared_experts."
_SHARED = (f"{_OWN}gate_proj", f"{_OWN}up_proj", f"{_OWN}down_proj")


def read_sigmoid_router(fields: ConfigFields) -> RouterSpec:
    """The router. Raises: CheckpointError."""
    fields.only("topk_method", "noaux_tc")
    fields.only("scoring_func", "sigmoid")
    num_experts, top_k = fields.num_experts("n_routed_experts")
    return RouterSpec(
        num_experts,
        top_k,
        is_sigmoid=True,
        renormalises=fields.flag("norm_topk_prob", default=True),
        factor=fields.routed_factor(),
        groups=read_groups(fields, num_experts, top_k, best=2),
        correction="mlp.gate.e_score_correction_bias",
    )


def read_groups(fields: ConfigFields, num_experts: int, top_k: int, *, best: int) -> Groups | None:
    """Groups of experts, rated by `best` scores; None for one. Raises: CheckpointError."""
    count = fields.integer("n_group", 1, num_experts // best, default=1)
    if num_experts % count:
        fields.fail("n_group", f"a divisor of n_routed_experts ({num_experts})")
    if count == 1:
        return None
    chosen = fields.integer("topk_group", 1, count)
    if top_k > chosen * num_experts // count:
        fields.fail("topk_group", f"enough groups for {top_k} experts of a token")
    return Groups(count, chosen, best)


def read_shared(fields: ConfigFields) -> GatedMLPSpec:
    """The feed-forward beside experts, as wide as several of them. Raises: CheckpointError."""
    inner_size = read_expert(fields, "moe_intermediate_size", EXPERT_NAMES).inner_size
    num_shared = fields.integer("n_shared_experts", 1, 64)
    wide = fields.changed({"shared_size": num_shared * inner_size})
    return read_expert(wide, "shared_size", _SHARED)


def first_dense(fields: ConfigFields) -> list[bool]:
    """Of each layer whether it has experts: all but the first ones. Raises: CheckpointError."""
    num_layers = fields.num_layers()
    num_dense = fields.integer("first_k_dense_replace", 0, num_layers)
    return [i >= num_dense for i in range(num_layers)]


def read_mixed_decoder(
    fields: ConfigFields, mixer: BlockSpec, router: RouterSpec, has_experts: Sequence[bool]
) -> Architecture:
    """A decoder with a `mixer` in each layer, experts in some. Raises: CheckpointError."""
    expert = read_expert(fields, "moe_intermediate_size", EXPERT_NAMES)
    dense = pre_norm_layer(fields, mixer, read_gated_mlp(fields))
    sparse = pre_norm_layer(fields, mixer, ExpertsSpec(expert, router), read_shared(fields))
    return read_decoder(fields, [sparse if each else dense for each in has_experts])
