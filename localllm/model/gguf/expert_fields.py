"""The fields of config.json of families with experts."""

from typing import Any

from localllm.model.gguf.dense_fields import granite, same_base, window
from localllm.model.gguf.keys import GgufKeys
from localllm.model.gguf.rope import FULL, read_rope_fields

Fields = dict[str, Any]
_SOFTMAX, _SIGMOID = 1, 2


def has_experts(keys: GgufKeys) -> bool:
    """Whether a file has any, of an architecture that other families share."""
    return keys.integer("expert_count", 0) > 0


def has_shared_experts(keys: GgufKeys) -> bool:
    """Whether a feed-forward for all rows stands beside them."""
    return keys.integer("expert_shared_feed_forward_length", 0) > 0


def is_sigmoid(keys: GgufKeys) -> bool:
    """Whether experts are chosen by sigmoids; where a file does not say so, by their correction."""
    kind = keys.integer("expert_gating_func", 0)
    return kind == _SIGMOID or (kind == 0 and keys.has_tensor("exp_probs_b.bias"))


def _chosen(keys: GgufKeys, name: str = "num_experts") -> Fields:
    return {
        name: keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
    }


def experts(keys: GgufKeys) -> Fields:
    """Experts with an inner size of their own."""
    inner = keys.integer("expert_feed_forward_length", keys.integer("feed_forward_length", 0))
    return {**_chosen(keys), "moe_intermediate_size": inner}


def mixtral(keys: GgufKeys) -> Fields:
    """Raises: CheckpointError, as all of these."""
    return _chosen(keys, "num_local_experts")


def olmoe(keys: GgufKeys) -> Fields:
    """Factors as the softmax gives them."""
    return {**_chosen(keys), "norm_topk_prob": False}


def qwen2_moe(keys: GgufKeys) -> Fields:
    """A shared feed-forward with a gate."""
    return {**beside_shared(keys), "norm_topk_prob": False}


def beside_shared(keys: GgufKeys) -> Fields:
    """Experts, and the inner size of what is beside them."""
    shared = keys.integer("expert_shared_feed_forward_length")
    return {**experts(keys), "shared_expert_intermediate_size": shared}


def qwen3_moe(keys: GgufKeys) -> Fields:
    """Factors that add up to 1."""
    return {**experts(keys), "norm_topk_prob": True}


def granite_moe(keys: GgufKeys) -> Fields:
    """Granite's multipliers."""
    return {**granite(keys), **_chosen(keys, "num_local_experts")}


def granite_moe_shared(keys: GgufKeys) -> Fields:
    """The same beside a shared feed-forward: as Granite 4 with attention in all layers."""
    return {
        **granite_moe(keys),
        "shared_intermediate_size": keys.integer("expert_shared_feed_forward_length"),
        "shared_mlp_is_split": True,
        "layer_types": [FULL] * keys.num_layers,
        "position_embedding_type": "rope",
    }


def gpt_oss(keys: GgufKeys) -> Fields:
    """YaRN whose ends are not rounded, which files do not say."""
    same_base(keys)
    rope = read_rope_fields(keys, keys.integer("attention.key_length"))
    return {
        "rope_scaling": {"rope_type": "default", **rope.get("rope_scaling", {}), "truncate": False},
        **window(keys),
        **_chosen(keys, "num_local_experts"),
        "intermediate_size": keys.integer("expert_feed_forward_length"),
        "attention_bias": keys.has_tensor("attn_q.bias"),
    }


def _routed(keys: GgufKeys) -> Fields:
    """Experts behind the first layers, beside a feed-forward as wide as some of them."""
    groups = keys.integer("expert_group_count", 1) or 1
    return {
        **_chosen(keys, "n_routed_experts"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "n_shared_experts": keys.integer("expert_shared_count"),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "n_group": groups,
        "topk_group": keys.integer("expert_group_used_count", groups) or groups,
        "first_k_dense_replace": keys.integer("leading_dense_block_count", 0),
    }


def glm4_moe(keys: GgufKeys) -> Fields:
    """Sigmoids; norms of heads in some models."""
    if not is_sigmoid(keys):
        raise keys.error("key expert_gating_func must be 2")
    return {
        **_routed(keys),
        "use_qk_norm": keys.has_tensor("attn_q_norm.weight"),
        "attention_bias": keys.has_tensor("attn_q.bias"),
    }


def deepseek_v2(keys: GgufKeys) -> Fields:
    """A softmax, over the best groups where there are several."""
    if keys.integer("expert_gating_func", _SOFTMAX) not in (0, _SOFTMAX):
        raise keys.error("key expert_gating_func must be 1 or 2")
    found = _routed(keys)
    has_groups = found["n_group"] > 1
    return {**found, "topk_method": "group_limited_greedy" if has_groups else "greedy"}


def deepseek_v3(keys: GgufKeys) -> Fields:
    """Sigmoids."""
    return _routed(keys)


def lfm2_experts(keys: GgufKeys) -> Fields:
    """Sigmoids, behind the first layers."""
    if not is_sigmoid(keys):
        raise keys.error("key expert_gating_func must be 2")
    return {
        **experts(keys),
        "num_dense_layers": keys.integer("leading_dense_block_count"),
        "use_expert_bias": keys.has_tensor("exp_probs_b.bias"),
        "norm_topk_prob": True,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
    }
