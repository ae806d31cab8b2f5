"""The fields of config.json of families with recurrences or convolutions in some layers."""

from typing import Any

from localllm.model.gguf.dense_fields import multipliers
from localllm.model.gguf.expert_fields import beside_shared, lfm2_experts
from localllm.model.gguf.keys import GgufKeys
from localllm.model.gguf.rope import FULL

Fields = dict[str, Any]
_LINEAR = "linear_attention"
_HEADS = "attention.head_count_kv"


def _with_heads(keys: GgufKeys, other: str) -> list[str]:
    """Layers with heads of keys are attention."""
    return [FULL if each else other for each in keys.by_layer(_HEADS, keys.num_layers)]


def qwen3_5(keys: GgufKeys) -> Fields:
    """A delta net whose value heads the converter has put into another order, see `delta_net`.

    Raises: CheckpointError, as all of these.
    """
    # How the rotation takes the places in images, which texts do not have.
    keys.skip("rope.dimension_sections")
    return {**_delta_net(keys), "value_heads_are_tiled": True}


def qwen3_5_moe(keys: GgufKeys) -> Fields:
    """The same with experts."""
    return {**qwen3_5(keys), **beside_shared(keys)}


def qwen3_next(keys: GgufKeys) -> Fields:
    """A delta net whose first linear is in parts, but in the oldest files."""
    return {
        **_delta_net(keys),
        **beside_shared(keys),
        "linear_inputs_are_split": not keys.has_tensor("ssm_in.weight"),
    }


def _delta_net(keys: GgufKeys) -> Fields:
    count = keys.integer("ssm.time_step_rank")
    width, rest = divmod(keys.integer("ssm.inner_size"), max(count, 1))
    if rest:
        raise keys.error("ssm.inner_size must be a multiple of ssm.time_step_rank")
    layers, every = keys.num_layers, keys.integer("full_attention_interval", 4) or 4
    kinds = [FULL if (i + 1) % every == 0 else _LINEAR for i in range(layers)]
    if "attention.recurrent_layers" in keys:
        recurrent = keys.by_layer("attention.recurrent_layers", layers)
        kinds = [_LINEAR if each else FULL for each in recurrent]
    return {
        "linear_conv_kernel_dim": keys.integer("ssm.conv_kernel"),
        "linear_key_head_dim": keys.integer("ssm.state_size"),
        "linear_num_key_heads": keys.integer("ssm.group_count"),
        "linear_num_value_heads": count,
        "linear_value_head_dim": width,
        "layer_types": kinds,
    }


def granite_hybrid(keys: GgufKeys) -> Fields:
    """Mamba-2 in layers without heads of keys."""
    count, inner = _mamba_sizes(keys)
    expand, rest = divmod(inner, max(keys.integer("embedding_length"), 1))
    if rest:
        raise keys.error("ssm.inner_size must be a multiple of embedding_length")
    experts = keys.integer("expert_count", 0)
    shared = "expert_shared_feed_forward_length" if experts else "feed_forward_length"
    is_turned = keys.flag("rope.scaling.finetuned", default=True)
    # Of files without experts, whose only feed-forward has the other's name.
    keys.skip("expert_shared_feed_forward_length")
    return {
        **multipliers(keys),
        "layer_types": _with_heads(keys, _LINEAR),
        "num_local_experts": experts,
        "num_experts_per_tok": keys.integer("expert_used_count", 0),
        "shared_intermediate_size": max(keys.by_layer(shared, keys.num_layers)),
        "shared_mlp_is_split": True,
        "attention_bias": keys.has_tensor("attn_output.bias"),
        "position_embedding_type": "rope" if is_turned else "nope",
        "mamba_n_heads": count,
        "mamba_d_head": inner // count,
        "mamba_expand": expand,
        "mamba_n_groups": keys.integer("ssm.group_count"),
        "mamba_d_state": keys.integer("ssm.state_size"),
        "mamba_d_conv": keys.integer("ssm.conv_kernel"),
        "mamba_conv_bias": keys.has_tensor("ssm_conv1d.bias"),
        "mamba_proj_bias": keys.has_tensor("ssm_in.bias"),
    }


def _mamba_sizes(keys: GgufKeys) -> tuple[int, int]:
    """The heads, and the values of all of them."""
    count, inner = keys.integer("ssm.time_step_rank"), keys.integer("ssm.inner_size")
    if count < 1 or inner < 1 or inner % count:
        raise keys.error("ssm.inner_size must be a multiple of ssm.time_step_rank")
    return count, inner


def nemotron_h(keys: GgufKeys) -> Fields:
    """One block in each layer, which its tensors tell: some files say nothing of feed-forwards
    beside layers with experts.
    """
    count, inner = _mamba_sizes(keys)
    # Only a head that drafts has a norm of this kind.
    eps = keys.number("attention.layer_norm_epsilon", 1e-5)
    return {
        "layers_block_type": [_kind(keys, i) for i in range(keys.num_layers)],
        "layer_norm_epsilon": keys.number("attention.layer_norm_rms_epsilon", eps),
        "mamba_num_heads": count,
        "mamba_head_dim": inner // count,
        "n_groups": keys.integer("ssm.group_count"),
        "ssm_state_size": keys.integer("ssm.state_size"),
        "conv_kernel": keys.integer("ssm.conv_kernel"),
        "use_conv_bias": keys.has_tensor("ssm_conv1d.bias"),
        "use_bias": keys.has_tensor("ssm_in.bias"),
        "mlp_bias": keys.has_tensor("ffn_down.bias"),
        "attention_bias": keys.has_tensor("attn_output.bias"),
    }


def _kind(keys: GgufKeys, layer: int) -> str:
    for name, kind in (("attn_q", FULL), ("ffn_up_exps", "moe"), ("ffn_up", "mlp")):
        if f"blk.{layer}.{name}.weight" in keys.header.tensors:
            return kind
    return _LINEAR


def nemotron_h_moe(keys: GgufKeys) -> Fields:
    """The same with experts."""
    latent = keys.integer("moe_latent_size", 0)
    groups = keys.integer("expert_group_count", 1) or 1
    shared, count = "expert_shared_feed_forward_length", keys.integer("expert_shared_count", 1)
    if count != 1:
        raise keys.error("key expert_shared_count must be 1")
    return {
        **nemotron_h(keys),
        "n_routed_experts": keys.integer("expert_count"),
        "num_experts_per_tok": keys.integer("expert_used_count"),
        "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": keys.integer(shared),
        "moe_latent_size": latent or None,
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0) or 1.0,
        "norm_topk_prob": keys.flag("expert_weights_norm"),
        "n_group": groups,
        "topk_group": keys.integer("expert_group_used_count", groups) or groups,
    }


def lfm2(keys: GgufKeys) -> Fields:
    """Convolutions in layers without heads of keys; the inner size is the adjusted one."""
    return {
        "layer_types": _with_heads(keys, "conv"),
        "conv_L_cache": keys.integer("shortconv.l_cache"),
        "conv_bias": keys.has_tensor("shortconv.conv.bias"),
        "block_auto_adjust_ff_dim": False,
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
    }


def lfm2_moe(keys: GgufKeys) -> Fields:
    """The same with experts."""
    return {**lfm2(keys), **lfm2_experts(keys)}
