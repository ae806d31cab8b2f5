"""Rotary embedding as a GGUF file's keys and tensors give it, as config.json would."""

from math import prod
from typing import Any

import numpy as np

from localllm.errors import UnsupportedModelError
from localllm.files.gguf import GgufTensor
from localllm.files.model_file import open_model_file
from localllm.model.config_fields import OTHER_ENGINE
from localllm.model.gguf.keys import GgufKeys

# What the frequencies of pairs are divided by, in all contexts, or in short and in long ones.
FACTORS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
_MOST_FACTORS = 1024


def read_rope_fields(keys: GgufKeys, head_dim: int) -> dict[str, Any]:
    """The fields of config.json: base, stretching, and the share of a head that turns.

    Raises: CheckpointError; UnsupportedModelError for a stretching that is not known.
    """
    fields: dict[str, Any] = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    width = keys.integer("rope.dimension_count", head_dim)
    if width != head_dim:
        fields["partial_rotary_factor"] = width / head_dim
    scaling = _scaling(keys)
    if scaling is not None:
        fields["rope_scaling"] = scaling
    return fields


def _scaling(keys: GgufKeys) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    context = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", context)
    keys.skip("rope.scaling.finetuned")
    tensors = keys.header.tensors
    if SHORT in tensors and LONG in tensors:
        return {
            "rope_type": "longrope",
            "short_factor": read_floats(keys, tensors[SHORT]),
            "long_factor": read_floats(keys, tensors[LONG]),
            "original_max_position_embeddings": original,
            "factor": context / original,
            "attention_factor": keys.number("rope.scaling.attn_factor", 1.0),
        }
    if FACTORS in tensors:
        # Llama 3's stretching, worked out: the same factors at every length.
        factors = read_floats(keys, tensors[FACTORS])
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": context,
            "attention_factor": 1.0,
        }
    if kind == "yarn":
        found = {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
            "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
        }
        if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
            raise keys.error("key rope.scaling.yarn_ext_factor must be 1")
        return found
    if kind == "linear" or (kind == "none" and factor != 1):
        return {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise UnsupportedModelError(
            f"rope scaling {kind!r:.40} is not supported", where=keys.where, hint=OTHER_ENGINE
        )
    return None


def read_floats(keys: GgufKeys, tensor: GgufTensor) -> list[float]:
    """The values of a small tensor of floats. Raises: CheckpointError."""
    count = prod(tensor.shape)
    if tensor.type.name != "F32" or count > _MOST_FACTORS:
        raise keys.error(f"tensor {tensor.name!r} must be at most {_MOST_FACTORS} floats (F32)")
    with open_model_file(tensor.file) as file:
        file.seek(tensor.start)
        values = np.frombuffer(file.read(4 * count), "<f4")
    if len(values) != count or not np.isfinite(values).all():
        raise keys.error(f"tensor {tensor.name!r} holds values that are not finite")
    return [float(each) for each in values]
