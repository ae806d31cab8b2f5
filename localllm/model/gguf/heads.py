"""The sizes of heads and their rotation, as GGUF's keys give them."""

from typing import Any

from localllm.model.gguf.keys import GgufKeys
from localllm.model.gguf.rope import (
    FACTORS,
    NOT_TURNED,
    frequency_factors,
    read_rope_fields,
    windows,
)


def usual_heads(keys: GgufKeys) -> dict[str, Any]:
    """Heads of one size in all layers that have any. Raises: CheckpointError."""
    sizes = _sizes(keys)
    return {**sizes, **read_rope_fields(keys, sizes["head_dim"])}


def unturned_heads(keys: GgufKeys) -> dict[str, Any]:
    """The same without a rotation, whatever the converter says of one. Raises: CheckpointError."""
    keys.skip("rope.freq_base", "rope.dimension_count")
    return _sizes(keys)


def _sizes(keys: GgufKeys) -> dict[str, int]:
    width, heads = keys.integer("embedding_length"), keys.integer("attention.head_count")
    if heads < 1:
        raise keys.error("the file claims to have no heads")
    head_dim = keys.integer("attention.key_length", width // heads)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error("values have another width than keys")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": max(keys.sizes("attention.head_count_kv", heads), default=heads),
        "head_dim": head_dim,
    }


def latent_heads(keys: GgufKeys) -> dict[str, Any]:
    """Heads over latents, whose keys and values one tensor gives, as in a checkpoint and in old
    files, or two. Raises: CheckpointError.
    """
    rope_dim, rank = keys.integer("rope.dimension_count"), keys.integer("attention.kv_lora_rank")
    key_dim = keys.integer("attention.key_length")
    value_dim = keys.integer("attention.value_length")
    is_split = keys.has_tensor("attn_k_b.weight")
    if is_split:
        # All heads share one, the row of the cache.
        if (key_dim, value_dim) != (rank + rope_dim, rank):
            raise keys.error("the widths of keys and values contradict that of latents")
        key_dim = keys.integer("attention.key_length_mla")
        value_dim = keys.integer("attention.value_length_mla")
    keys.skip("attention.head_count_kv")
    rope = read_rope_fields(keys, rope_dim)
    if "rope_scaling" in rope:
        # The converter's factor, which other architectures do without.
        multiplier = keys.number("rope.scaling.yarn_log_multiplier", 0.0) / 0.1
        rope["rope_scaling"] |= both_scales(multiplier)
    else:
        keys.skip("rope.scaling.yarn_log_multiplier")
    return {
        "num_attention_heads": keys.integer("attention.head_count"),
        "q_lora_rank": keys.integer("attention.q_lora_rank", 0) or None,
        "kv_lora_rank": rank,
        "qk_nope_head_dim": key_dim - rope_dim,
        "qk_rope_head_dim": rope_dim,
        "v_head_dim": value_dim,
        "kv_b_is_split": is_split,
        **rope,
    }


def both_scales(multiplier: float) -> dict[str, float]:
    """YaRN's two multipliers of logarithms, of which files hold one: they are equal in all models,
    so that queries and keys keep their length.
    """
    multiplier = float(f"{multiplier:.6g}")
    return {"mscale": multiplier, "mscale_all_dim": multiplier} if multiplier else {}


def gemma4_heads(keys: GgufKeys) -> dict[str, Any]:
    """Heads of full layers and of windowed ones, which differ. Raises: CheckpointError."""
    full, windowed = (keys.integer(f"attention.key_length{each}") for each in ("", "_swa"))
    values = [keys.integer(f"attention.value_length{each}") for each in ("", "_swa")]
    turned = [keys.integer(f"rope.dimension_count{each}") for each in ("", "_swa")]
    if values != [full, windowed] or turned != values:
        raise keys.error("keys, values and what turns of them have different widths")
    heads = keys.integer("attention.head_count")
    kinds = windows(keys)
    if kinds is None:
        raise keys.error("key attention.sliding_window_pattern is missing")
    num_kv = keys.by_layer("attention.head_count_kv", keys.num_layers, heads)
    of_kind = dict(zip(kinds, num_kv, strict=True))
    base = keys.number("rope.freq_base")
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": of_kind.get("sliding_attention", num_kv[0]),
        "num_global_key_value_heads": of_kind.get("full_attention", num_kv[0]),
        "head_dim": windowed,
        "global_head_dim": full,
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": _share_that_turns(keys, full),
                "rope_theta": base,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": keys.number("rope.freq_base_swa", base),
            },
        },
    }


def _share_that_turns(keys: GgufKeys, head_dim: int) -> float:
    """Of the pairs of a full layer's head, whose frequencies are those of the whole head."""
    factors = frequency_factors(keys)
    if factors is None:
        return 1.0
    count = factors.count(1.0)
    is_known = factors == [1.0] * count + [NOT_TURNED] * (len(factors) - count)
    if not is_known or 2 * len(factors) != head_dim:
        raise keys.error(f"tensor {FACTORS!r} must hold ones, and 1e30 for pairs at rest")
    return count / len(factors)
