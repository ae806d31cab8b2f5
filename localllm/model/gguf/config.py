"""The config.json that a GGUF file's header stands for."""

from typing import Any

from localllm.errors import UnsupportedModelError
from localllm.files.gguf import GgufHeader
from localllm.model.config_fields import OTHER_ENGINE
from localllm.model.gguf.families import GGUF_FAMILIES, family_of
from localllm.model.gguf.keys import GgufKeys
from localllm.model.gguf.rope import read_rope_fields

_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"


def config_of(header: GgufHeader) -> dict[str, Any]:
    """The fields of the config.json of the same model as a checkpoint.

    Raises: CheckpointError; UnsupportedModelError for a family that is not known, and for a key of
    the architecture that nobody reads.
    """
    keys = GgufKeys(header)
    family = family_of(keys)
    if family is None:
        raise UnsupportedModelError(
            f"GGUF files of the architecture {keys.architecture!r:.60} are not supported; known: "
            f"{', '.join(GGUF_FAMILIES)}",
            where=keys.where,
            hint=OTHER_ENGINE,
        )
    fields = {"architectures": [family.model_class], **_shared(keys), **family.config(keys)}
    if family.is_paired:
        fields["rope_interleave"] = True
    keys.refuse_unread()
    return fields


def _shared(keys: GgufKeys) -> dict[str, Any]:
    tensors = keys.header.tensors
    if _EMBEDDING not in tensors:
        raise keys.error(f"tensor {_EMBEDDING!r} is missing")
    vocab_size, width = tensors[_EMBEDDING].shape[0], keys.integer("embedding_length")
    layers = keys.integer("block_count") - keys.integer("nextn_predict_layers", 0)
    heads = keys.integer("attention.head_count")
    if layers < 1 or heads < 1:
        raise keys.error("the file claims to have no layers, or no heads")
    head_dim = keys.integer("attention.key_length", width // heads)
    fields = {
        "vocab_size": vocab_size,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": keys.integer("context_length"),
        "tie_word_embeddings": _HEAD not in tensors,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf"},
        **read_rope_fields(keys, head_dim),
    }
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.error("values have another width than keys")
    if "feed_forward_length" in keys:
        fields["intermediate_size"] = keys.integer("feed_forward_length")
    if "attention.layer_norm_rms_epsilon" in keys:
        fields["rms_norm_eps"] = round_to_float(keys.number("attention.layer_norm_rms_epsilon"))
    window = keys.integer("attention.sliding_window", 0)
    fields["sliding_window"] = window or None
    keys.skip("vocab_size", "rope.scaling.attn_factor")
    return fields


def round_to_float(value: float) -> float:
    """The shortest decimal number that is stored as this one in 32 bits, as 1e-6 is."""
    return float(f"{value:.7g}")
