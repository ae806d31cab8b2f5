"""The fields of config.json of families whose layers are attention and one feed-forward."""

from typing import Any

from localllm.model.gguf.heads import both_scales
from localllm.model.gguf.keys import GgufKeys
from localllm.model.gguf.rope import FULL, SLIDING, read_rope_fields, windows

Fields = dict[str, Any]


def llama(keys: GgufKeys) -> Fields:
    """Raises: CheckpointError, as all of these."""
    return {
        "attention_bias": keys.has_tensor("attn_output.bias"),
        "mlp_bias": keys.has_tensor("ffn_down.bias"),
    }


def attention_bias(keys: GgufKeys) -> Fields:
    """Of query, key and value, maybe of the output too."""
    return {"attention_bias": keys.has_tensor("attn_q.bias")}


def seed_oss(keys: GgufKeys) -> Fields:
    """Biases apart."""
    return {
        **llama(keys),
        **attention_bias(keys),
        "attention_out_bias": keys.has_tensor("attn_output.bias"),
    }


def ernie(keys: GgufKeys) -> Fields:
    """One flag for all biases."""
    return {"use_bias": keys.has_tensor("attn_q.bias")}


def mistral3(keys: GgufKeys) -> Fields:
    """YaRN, and queries that grow."""
    rope = read_rope_fields(keys, keys.integer("attention.key_length"))
    multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0)
    parameters = {
        "rope_theta": rope["rope_theta"],
        "llama_4_scaling_beta": keys.number("attention.temperature_scale", 0.0),
        **rope.get("rope_scaling", {"rope_type": "default"}),
        **both_scales(multiplier),
    }
    return {"rope_parameters": parameters, "rope_scaling": None}


def window(keys: GgufKeys) -> Fields:
    """The width of windows."""
    return {"sliding_window": keys.integer("attention.sliding_window", 0) or None}


def same_base(keys: GgufKeys) -> None:
    """Raises: CheckpointError for layers with windows that turn by another base."""
    base = keys.number("rope.freq_base", 10000.0)
    if keys.number("rope.freq_base_swa", base) != base:
        raise keys.error("key rope.freq_base_swa must be rope.freq_base")


def phi3(keys: GgufKeys) -> Fields:
    """A window in all layers, and the context from which on other factors count."""
    context = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", context)
    return {**window(keys), "original_max_position_embeddings": original}


def windowed(keys: GgufKeys) -> Fields:
    """Windows in some layers, of which the file says which."""
    kinds = windows(keys)
    return window(keys) if kinds is None else {**window(keys), "layer_types": kinds}


def exaone4(keys: GgufKeys) -> Fields:
    """Windows in some layers, or in none."""
    same_base(keys)
    return {**windowed(keys), "sliding_window_pattern": 4}


def _every(keys: GgufKeys, count: int) -> list[str]:
    """Windows in all but the last of `count` layers, which files do not say."""
    return [SLIDING if (i + 1) % count else FULL for i in range(keys.num_layers)]


def gemma2(keys: GgufKeys) -> Fields:
    """Capped scores and logits."""
    same_base(keys)
    head_dim, heads = (
        keys.integer("attention.key_length", 256),
        keys.integer("attention.head_count"),
    )
    # Of the model with 27 billion parameters alone: the width of a head if all had equal parts.
    equal = keys.integer("embedding_length") // heads
    return {
        **window(keys),
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": equal if keys.num_layers == 46 else head_dim,
        "layer_types": _every(keys, 2),
    }


def gemma3(keys: GgufKeys) -> Fields:
    """A rotation of their own for layers with windows."""
    head_dim, heads = (
        keys.integer("attention.key_length", 256),
        keys.integer("attention.head_count"),
    )
    equal = keys.integer("embedding_length") // heads
    return {
        **window(keys),
        "query_pre_attn_scalar": equal if keys.num_layers == 62 else head_dim,
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
        # Old files do not say it.
        "rope_local_base_freq": keys.number("rope.freq_base_swa", 10000.0),
        "layer_types": windows(keys) or _every(keys, 6),
    }


def cohere2(keys: GgufKeys) -> Fields:
    """Norms with the mean taken out."""
    same_base(keys)
    return {
        **window(keys),
        "layer_norm_eps": keys.number("attention.layer_norm_epsilon"),
        "logit_scale": keys.number("logit_scale"),
        "layer_types": _every(keys, 4),
    }


def olmo3(keys: GgufKeys) -> Fields:
    """A rotation of their own for layers with windows, which is not stretched."""
    rope = read_rope_fields(keys, keys.integer("attention.key_length"))
    base = rope["rope_theta"]
    full = {"rope_type": "default", **rope.get("rope_scaling", {}), "rope_theta": base}
    windowed_base = keys.number("rope.freq_base_swa", base)
    own = {"rope_type": "default", "rope_theta": windowed_base}
    return {
        **windowed(keys),
        "rope_scaling": None,
        "rope_parameters": {FULL: full, SLIDING: own},
    }


def smollm3(keys: GgufKeys) -> Fields:
    """Every fourth layer does not turn, which files do not say."""
    return {**llama(keys), "no_rope_layer_interval": 4}


def granite(keys: GgufKeys) -> Fields:
    """Multipliers."""
    if not keys.flag("rope.scaling.finetuned", default=True):
        raise keys.error("key rope.scaling.finetuned must be true")
    if not keys.has_tensor("ssm_in.weight"):
        # A Granite 4 without any Mamba, which says all the same what its Mamba would be, and has
        # its only feed-forward under the name of experts' one.
        sizes = "conv_kernel", "state_size", "group_count", "inner_size", "time_step_rank"
        keys.skip(*(f"ssm.{each}" for each in sizes), "expert_shared_feed_forward_length")
    return {**llama(keys), **multipliers(keys)}


def multipliers(keys: GgufKeys) -> Fields:
    """Those of Granite."""
    return {
        "attention_multiplier": keys.number("attention.scale"),
        "embedding_multiplier": keys.number("embedding_scale", 1.0),
        "residual_multiplier": keys.number("residual_scale", 1.0),
        "logits_scaling": keys.number("logit_scale", 1.0),
    }


def gemma4(keys: GgufKeys) -> Fields:
    """Dense or with experts beside the feed-forward; inputs for each layer, or none."""
    layers, shared = keys.num_layers, keys.integer("attention.shared_kv_layers", 0)
    lengths = keys.by_layer("feed_forward_length", layers)
    width = keys.integer("embedding_length_per_layer_input", 0)
    table = keys.header.tensors.get("per_layer_token_embd.weight")
    experts = keys.integer("expert_count", 0)
    own = {
        **window(keys),
        "num_kv_shared_layers": shared,
        "use_double_wide_mlp": len({*lengths}) > 1,
        "hidden_size_per_layer_input": width,
        "vocab_size_per_layer_input": table.shape[0] if table is not None else 1,
        "attention_k_eq_v": _lacks_values(keys, layers - shared),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 0.0) or None,
    }
    if experts:
        own |= {
            "enable_moe_block": True,
            "num_experts": experts,
            "top_k_experts": keys.integer("expert_used_count"),
            "moe_intermediate_size": keys.integer("expert_feed_forward_length"),
        }
    else:
        keys.skip("expert_feed_forward_length")
    return own


def _lacks_values(keys: GgufKeys, count: int) -> bool:
    """Whether full layers among the first `count` take keys as values."""
    names = keys.header.tensors
    kinds = windows(keys) or []
    return any(
        kind == FULL and f"blk.{i}.attn_v.weight" not in names
        for i, kind in enumerate(kinds[:count])
    )
