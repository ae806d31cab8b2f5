"""The config.json that a GGUF file's header stands for."""

from typing import Any

from localllm.errors import UnsupportedModelError
from localllm.files.gguf import GgufHeader
from localllm.model.config_fields import OTHER_ENGINE
from localllm.model.gguf.families import GGUF_FAMILIES, family_of
from localllm.model.gguf.keys import GgufKeys

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
    fields = {
        "architectures": [family.model_class],
        **_sizes(keys),
        **family.heads(keys),
        **family.config(keys),
    }
    if family.is_paired:
        fields["rope_interleave"] = True
    keys.refuse_unread()
    return fields


def _sizes(keys: GgufKeys) -> dict[str, Any]:
    tensors = keys.header.tensors
    if _EMBEDDING not in tensors:
        raise keys.error(f"tensor {_EMBEDDING!r} is missing")
    fields = {
        "vocab_size": tensors[_EMBEDDING].shape[0],
        "hidden_size": keys.integer("embedding_length"),
        "num_hidden_layers": keys.num_layers,
        "max_position_embeddings": keys.integer("context_length"),
        "bos_token_id": keys.header.keys.get("tokenizer.ggml.bos_token_id"),
        "tie_word_embeddings": _HEAD not in tensors,
        "torch_dtype": "bfloat16",
        "quantization_config": {"quant_method": "gguf"},
    }
    # Where layers differ in more than whether they have one, their tensors' shapes are refused.
    inner = keys.sizes("feed_forward_length", 0)
    if inner:
        fields["intermediate_size"] = inner[0]
    if "attention.layer_norm_rms_epsilon" in keys:
        fields["rms_norm_eps"] = keys.number("attention.layer_norm_rms_epsilon")
    # Families with windows and experts ask for them.
    keys.skip_zeros(
        "attention.sliding_window",
        "expert_count",
        "expert_used_count",
        "expert_shared_count",
        "expert_shared_feed_forward_length",
    )
    # As many as the embedding table has; what a converter was told of the rotation; and how those
    # who embed texts pool, which users choose here.
    keys.skip("vocab_size", "rope.scaling.finetuned", "pooling_type")
    return fields
