"""A GGUF file as the source of a quantized copy: tensors as a checkpoint in 16 bits has them."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm.errors import UnsupportedModelError
from localllm.model.architecture import Architecture, layer_name
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.gguf.tensors import GgufInfo
from localllm.model.layer import LayerPlan
from localllm.model.tensor_info import TensorInfo
from localllm.model.weight_check import WeightMap, check_weights

_FEWEST_BITS = 8
# In config.json: queries and keys have another order than checkpoints of the class.
PAIRED = "rope_interleave"
# And that tensors are cut or grouped in another way, which other programs would not read.
_REGROUPED = (
    *("value_heads_are_tiled", "linear_inputs_are_split", "kv_b_is_split", "shared_mlp_is_split"),
)


def is_gguf_source(architecture: Architecture) -> bool:
    """Whether a model was read from a GGUF file."""
    return (architecture.quantization or {}).get("quant_method") == "gguf"


def read_gguf_source(
    architecture: Architecture, files: list[Path], config: Mapping[str, Any]
) -> tuple[Architecture, WeightMap]:
    """The architecture and the tensors of the checkpoint that a file was made from, each
    dequantized as it is read; `config`: the config.json that stands for the file's header.

    Raises: as `check_weights`; UnsupportedModelError for weights of less than eight bits, and for
    a family whose tensors are grouped otherwise there.
    """
    if any(config.get(name) for name in _REGROUPED):
        raise UnsupportedModelError(
            f"GGUF files hold the tensors of {architecture.name} in other groups than checkpoints",
            where=str(files[0]),
            hint="quantize the checkpoint that it was made from",
        )
    architecture = replace(architecture, quantization=None)
    weights = check_weights(files, architecture)
    for info in weights.plain.values():
        if isinstance(info, GgufInfo) and 8 * info.type.num_bytes < (
            _FEWEST_BITS * info.type.num_values
        ):
            raise UnsupportedModelError(
                f"{info.name} has less than {_FEWEST_BITS} bits already ({info.dtype})",
                where=str(info.file),
                hint="a file in Q8_0, F16 or BF16, or the checkpoint that it was made from",
            )
    if not config.get(PAIRED):
        return architecture, weights
    plain = dict(weights.plain)
    layers = list[LayerPlan]()
    for i, plan in enumerate(architecture.layers):
        for place in plan.places:
            if isinstance(place.block, AttentionSpec) and place.block.rope.is_interleaved:
                plain |= _unpaired(weights.plain, layer_name(i), place.block)
        layers.append(_unturned(plan))
    return replace(architecture, layers=tuple(layers)), WeightMap(plain, weights.quantized)


def _unpaired(
    plain: Mapping[str, TensorInfo], layer: str, spec: AttentionSpec
) -> dict[str, TensorInfo]:
    """The queries and keys of a layer, in the order of the checkpoint."""
    names = (
        f"{layer}.{spec.linears.name}.{kind}_proj.{ending}"
        for kind in ("q", "k")
        for ending in ("weight", "bias")
    )
    return {
        name: replace(info, change="paired", head_dim=spec.head_dim)
        for name in names
        if isinstance(info := plain.get(name), GgufInfo)
    }


def _unturned(plan: LayerPlan) -> LayerPlan:
    places = []
    for place in plan.places:
        block = place.block
        if isinstance(block, AttentionSpec):
            block = replace(block, rope=replace(block.rope, is_interleaved=False))
        places.append(replace(place, block=block))
    return replace(plan, places=tuple(places))
