"""The loader's names of tensors by GGUF's, as families share them."""

from collections.abc import Mapping

# The name of a tensor here, or those of which it holds the rows, in equal parts; "{}" stands for
# the number of an expert.
Names = Mapping[str, str | tuple[str, ...]]

# Beside the layers.
TOP: Mapping[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}


def experts_at(block: str, gate: str, up: str, down: str) -> Names:
    """The names of experts' linears; `block`: what their own names begin with."""
    gate, up, down = (f"{block}.{name}" for name in (gate, up, down))
    return {
        "ffn_gate_exps": gate,
        "ffn_up_exps": up,
        "ffn_gate_up_exps": (gate, up),
        "ffn_down_exps": down,
    }


def shared_at(block: str) -> Names:
    """The names of the linears of a feed-forward beside experts."""
    return {
        "ffn_gate_shexp": f"{block}.gate_proj",
        "ffn_up_shexp": f"{block}.up_proj",
        "ffn_down_shexp": f"{block}.down_proj",
    }


# Of a layer's tensors, without "blk.N." and "model.layers.N.".
USUAL: Names = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    **experts_at("mlp.experts.{}", "gate_proj", "up_proj", "down_proj"),
    **shared_at("mlp.shared_expert"),
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    # A layer that drafts, see mtp.py.
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_norm": "shared_head.norm",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.embed_tokens": "embed_tokens",
}
AROUND: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Also of a norm before the feed-forward, where GGUF names it by its place behind the attention.
BEHIND: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
WHOLE_MLP: Names = {"ffn_up": "mlp.gate_up_proj"}
CORRECTED: Names = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
GEMMA4: Names = {
    **AROUND,
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    **experts_at("experts.{}", "gate_proj", "up_proj", "down_proj"),
}
GEMMA4_TOP: Mapping[str, str] = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
LFM2: Names = {
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "attn_output": "self_attn.out_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "ffn_gate_inp": "feed_forward.gate",
    "exp_probs_b.bias": "feed_forward.expert_bias",
    **experts_at("feed_forward.experts.{}", "w1", "w3", "w2"),
}
LFM2_TOP: Mapping[str, str] = {"token_embd_norm": "model.embedding_norm"}
DELTA_NET: Names = {
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_in": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
LATENT: Names = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
    **shared_at("mlp.shared_experts"),
    **CORRECTED,
}
GRANITE_EXPERTS: Names = {
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    **experts_at("block_sparse_moe.experts.{}", "gate_proj", "up_proj", "down_proj"),
    **shared_at("shared_mlp"),
}


def mamba_at(block: str) -> Names:
    """The names of a Mamba-2 block."""
    return {
        "ssm_in": f"{block}.in_proj",
        "ssm_conv1d": f"{block}.conv1d",
        "ssm_a": f"{block}.A_log",
        "ssm_d": f"{block}.D",
        "ssm_dt.bias": f"{block}.dt_bias",
        "ssm_norm": f"{block}.norm",
        "ssm_out": f"{block}.out_proj",
    }


NEMOTRON_H: Names = {
    "attn_norm": "norm",
    "attn_q": "mixer.q_proj",
    "attn_k": "mixer.k_proj",
    "attn_v": "mixer.v_proj",
    "attn_output": "mixer.o_proj",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
    "ffn_gate_inp": "mixer.gate",
    "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
    "ffn_latent_down": "mixer.fc1_latent_proj",
    "ffn_latent_up": "mixer.fc2_latent_proj",
    **experts_at("mixer.experts.{}", "gate_proj", "up_proj", "down_proj"),
    **shared_at("mixer.shared_experts"),
    **mamba_at("mixer"),
}
