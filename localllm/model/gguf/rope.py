"""Rotary embedding as a GGUF file's keys and tensors give it, as config.json would."""

import math
import re
from math import prod
from typing import Any

from localllm.errors import UnsupportedModelError
from localllm.files.gguf import GgufTensor
from localllm.files.model_file import open_model_file
from localllm.model.config_fields import OTHER_ENGINE
from localllm.model.gguf.keys import GgufKeys, shortest

SLIDING, FULL = "sliding_attention", "full_attention"

# What the frequencies of pairs are divided by, in all contexts, or in short and in long ones.
FACTORS = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
# What stands in FACTORS for pairs that do not turn.
NOT_TURNED = 1e30
# Of each layer, in old files: the frequencies themselves.
FREQUENCIES = re.compile(r"blk\.\d{1,4}\.attn_rot_embd\.weight")
_MOST_FACTORS, _LARGEST = 1024, 1e6
# Frequencies in old files were computed in another order.
_TOLERANCE = 1e-5


def read_rope_fields(keys: GgufKeys, head_dim: int) -> dict[str, Any]:
    """The fields of config.json: base, stretching, and the share of a head that turns.

    Raises: CheckpointError; UnsupportedModelError for a stretching that is not known.
    """
    base = keys.number("rope.freq_base", 10000.0)
    width = keys.integer("rope.dimension_count", head_dim)
    if not 0 < width <= head_dim:
        raise keys.error(f"the file claims that {width} of {head_dim} values of a head turn")
    fields: dict[str, Any] = {"rope_theta": base}
    if width != head_dim:
        fields["partial_rotary_factor"] = width / head_dim
    scaling = _scaling(keys)
    if scaling is not None:
        fields["rope_scaling"] = scaling
    _check_frequencies(keys, base, width)
    return fields


def windows(keys: GgufKeys) -> list[str] | None:
    """The kind of each layer's attention, as config.json calls it; None if the file does not say.

    Raises: CheckpointError.
    """
    if "attention.sliding_window_pattern" not in keys:
        return None
    pattern = keys.by_layer("attention.sliding_window_pattern", keys.num_layers)
    return [SLIDING if each else FULL for each in pattern]


def _scaling(keys: GgufKeys) -> dict[str, Any] | None:
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    context = keys.integer("context_length")
    original = keys.integer("rope.scaling.original_context_length", context) or context
    attention = keys.number("rope.scaling.attn_factor", 1.0)
    tensors = keys.header.tensors
    if SHORT in tensors and LONG in tensors:
        return {
            "rope_type": "longrope",
            "short_factor": read_floats(keys, tensors[SHORT]),
            "long_factor": read_floats(keys, tensors[LONG]),
            "original_max_position_embeddings": original,
            "factor": context / max(original, 1),
            "attention_factor": attention,
        }
    if attention != 1 and kind != "yarn":
        raise keys.error("key rope.scaling.attn_factor must be 1")
    factors = frequency_factors(keys)
    if factors is not None:
        # Llama 3's stretching, worked out: the same factors at every length.
        if kind != "none" or not all(0 < each <= _LARGEST for each in factors):
            raise keys.error(
                f"tensor {FACTORS!r} must hold numbers above 0 and up to a million, in place of "
                "another stretching"
            )
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "original_max_position_embeddings": context,
            "attention_factor": 1.0,
        }
    if kind == "yarn":
        return _yarn(keys, factor, original)
    if kind == "linear" or (kind == "none" and factor != 1):
        return {"rope_type": "linear", "factor": factor}
    if kind != "none":
        raise UnsupportedModelError(
            f"rope scaling {kind!r:.40} is not supported", where=keys.where, hint=OTHER_ENGINE
        )
    return None


def _yarn(keys: GgufKeys, factor: float, original: int) -> dict[str, Any]:
    if keys.number("rope.scaling.yarn_ext_factor", 1.0) != 1:
        raise keys.error("key rope.scaling.yarn_ext_factor must be 1")
    found = {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    # An older converter wrote OLMo 3's under the other name, where 1 says nothing.
    older = keys.number("rope.scaling.attn_factor", 1.0)
    if "rope.scaling.yarn_attn_factor" in keys:
        found["attention_factor"] = keys.number("rope.scaling.yarn_attn_factor")
    elif older != 1:
        found["attention_factor"] = older
    return found


def frequency_factors(keys: GgufKeys) -> list[float] | None:
    """What the frequencies of pairs are divided by; None if by nothing. Raises: CheckpointError."""
    tensor = keys.header.tensors.get(FACTORS)
    return None if tensor is None else read_floats(keys, tensor)


def _check_frequencies(keys: GgufKeys, base: float, width: int) -> None:
    """Raises: CheckpointError for frequencies that are not those of `base`."""
    for name, tensor in keys.header.tensors.items():
        if FREQUENCIES.fullmatch(name):
            found = read_floats(keys, tensor)
            try:
                usual = [math.exp(-2 * i / width * math.log(base)) for i in range(width // 2)]
            except (ValueError, OverflowError):  # of a base that is no positive number, or tiny
                usual = []
            if len(found) != len(usual) or not all(
                math.isclose(own, one, rel_tol=_TOLERANCE)
                for own, one in zip(found, usual, strict=True)
            ):
                raise keys.error(
                    f"tensor {name!r} holds other frequencies than rope.freq_base says"
                )


def read_floats(keys: GgufKeys, tensor: GgufTensor) -> list[float]:
    """The values of a small tensor of floats, as short as they can be written. Raises:
    CheckpointError.
    """
    count = prod(tensor.shape)
    if tensor.type.name != "F32" or count > _MOST_FACTORS:
        raise keys.error(f"tensor {tensor.name!r} must be at most {_MOST_FACTORS} floats (F32)")
    with open_model_file(tensor.file) as file:
        file.seek(tensor.start)
        stored = file.read(4 * count)
    values = memoryview(stored).cast("f") if len(stored) == 4 * count else ()
    if len(values) != count or not all(map(math.isfinite, values)):
        raise keys.error(f"tensor {tensor.name!r} holds values that are not finite")
    return [shortest(each) for each in values]
