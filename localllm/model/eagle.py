"""Heads that were trained for a model of others and lie in a folder of their own: EAGLE, EAGLE-3.

Like those of mtp.py they make an entry of each hidden state and the token after it. Files have the
authors' layout or that of the speculators package; what their configs leave unsaid, their tensors
say: whether there are biases, norms, a table of embeddings, and which of all tokens are drafted.

Sources: Li et al. 2024 (EAGLE), 2025 (EAGLE-3) and their code (github.com/SafeAILab/EAGLE), where
layers are named midlayer; the speculators package, versions 0.2 (EAGLE) and 0.9 (EAGLE-3); vLLM for
`eagle_config`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from localllm.errors import CheckpointError, RequestError, UnsupportedModelError
from localllm.files.json_file import read_json_object
from localllm.model.architecture import EMBEDDING, FINAL_NORM, HEAD, Architecture, layer_name
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.table import architecture_of
from localllm.model.found_head import EMBEDDING_NORM, HIDDEN_NORM, FoundHead, HeadLayout
from localllm.model.join import DRAFTED, FUSION, JOIN, DraftedAs, FusionSpec, JoinSpec
from localllm.model.layer import LayerPlan, Place
from localllm.model.norm import NormSpec
from localllm.model.own_head import differ
from localllm.model.stored_names import own_tensors
from localllm.model.tensor_files import read_headers
from localllm.model.tensor_info import TensorInfo
from localllm.model.weight_check import check_tensors
from localllm.model.weight_files import find_weight_files

_FUSION_NORM = "model.fusion_norm"
_TABLE = EMBEDDING.removesuffix("weight")
# How the names of the first layer begin: in EAGLE-3, in speculators' EAGLE, and in others.
_FIRST_LAYERS = ("midlayer.", "transformer.", "layers.0.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def _eagle_layout(first_layer: str) -> HeadLayout:
    """EAGLE's own names, and those of speculators."""
    return HeadLayout(
        (
            ("fc.", f"{JOIN}."),
            ("fusion_fc.", f"{JOIN}."),
            ("embedding_layernorm.", f"{EMBEDDING_NORM}."),
            ("pre_lm_head_layernorm.", f"{FINAL_NORM}."),
            (first_layer, f"{layer_name(0)}."),
            ("layers.", "model.layers."),
            ("embed_tokens.", _TABLE),
            ("lm_head.", ""),  # the target's
        )
    )


def _eagle3_layout(first_layer: str) -> HeadLayout:
    """The same of EAGLE-3."""
    return HeadLayout(
        (
            ("fc.", f"{FUSION}."),
            ("input_norm.", f"{_FUSION_NORM}.0."),
            ("fc_norm.", f"{_FUSION_NORM}."),
            (f"{first_layer}input_layernorm.", f"{EMBEDDING_NORM}."),
            (f"{first_layer}hidden_norm.", f"{HIDDEN_NORM}."),
            (first_layer, f"{layer_name(0)}."),
            ("layers.", "model.layers."),
            ("norm.", f"{FINAL_NORM}."),
            ("lm_head.", f"{HEAD}."),
            ("d2t", DRAFTED),
            ("t2d", ""),  # says the same
            ("embed_tokens.", _TABLE),
            ("verifier_", ""),  # the target's
        )
    )


def find_eagle(
    name: str, folder: Path, target_name: str, target: Architecture, target_files: Sequence[Path]
) -> FoundHead:
    """The head `name` in a folder, checked, for a model.

    Raises: CheckpointError, UnsupportedModelError; RequestError if it is of another model.
    """
    raw, stored = read_json_object(folder / "config.json"), read_headers(find_weight_files(folder))
    where = str(folder / "config.json")
    is_eagle3 = any(each.endswith(".hidden_norm.weight") for each in stored)
    used = (each for each in _FIRST_LAYERS if any(name.startswith(each) for name in stored))
    layout = (_eagle3_layout if is_eagle3 else _eagle_layout)(next(used, _FIRST_LAYERS[-1]))
    found = layout.renamed({each: info for each, info in stored.items() if _is_known(each, layout)})
    # Those that are not known are refused with a message as those of other models are.
    found |= {each: info for each, info in stored.items() if not _is_known(each, layout)}
    if (FUSION if is_eagle3 else JOIN) + ".weight" not in found:
        raise CheckpointError(
            f"{name} is no EAGLE head", where=str(folder), hint="--spec draft:MODEL for a model"
        )
    if EMBEDDING in found and not _is_other_table(found[EMBEDDING], target_files, target):
        del found[EMBEDDING]
    base, fields = _as_model(raw, found, target, where)
    first = found[f"{FUSION if is_eagle3 else JOIN}.weight"]
    width_in = base.hidden_size + target.hidden_size
    if is_eagle3:
        layers = _taken_layers(fields, target)
        width_in = len(layers) * target.hidden_size
    _check_fits(name, base, first, width_in, target_name, target, has_table=EMBEDDING in found)
    if is_eagle3:
        architecture = _eagle3(fields, base, found, len(layers), target.hidden_size)
        is_behind_norm = fields.flag("norm_output")
        own_tap = base.num_layers if is_behind_norm else base.num_layers - 1
        taps = tuple(layer - 1 for layer in layers)
    else:
        architecture = _eagle(base, found)
        taps, own_tap = (target.num_layers,), base.num_layers - 1
    weights = check_tensors(found, architecture, layout.stored_name)
    return FoundHead("EAGLE", architecture, weights, layout, taps, own_tap)


def _is_known(name: str, layout: HeadLayout) -> bool:
    return name.startswith(tuple(stored for stored, _ in layout.names))


def _is_other_table(own: TensorInfo, target_files: Sequence[Path], target: Architecture) -> bool:
    """Whether a head's table of embeddings is not that of its target, which most heads copy."""
    table = own_tensors(read_headers(list(target_files)), target).get(EMBEDDING)
    if table is None or (table.dtype, table.shape) != (own.dtype, own.shape):
        return True
    return differ(own, table)


def _as_model(
    raw: Mapping[str, Any], found: Mapping[str, TensorInfo], target: Architecture, where: str
) -> tuple[Architecture, ConfigFields]:
    """The layers of a head as those of a model, and the fields that are the head's own."""
    kind = raw.get("speculators_model_type")
    if kind not in (None, "eagle", "eagle3"):
        raise UnsupportedModelError(
            f"heads of the kind {kind!r:.40} are not supported",
            where=where,
            hint="a head of the kind eagle3 or eagle",
        )
    inner = raw.get("transformer_layer_config", raw)
    if not isinstance(inner, dict):
        ConfigFields(raw, where).fail("transformer_layer_config", "an object")
    numbers = [int(match[1]) for match in map(_LAYER.match, found) if match]
    has_norms = any("q_norm" in name for name in found)
    model = {
        **inner,
        "architectures": ["Qwen3ForCausalLM" if has_norms else "LlamaForCausalLM"],
        "num_hidden_layers": 1 + max(numbers, default=0),
        "vocab_size": target.vocab_size,
        "tie_word_embeddings": True,
        "quantization_config": raw.get("quantization_config"),
    }
    own = raw.get("eagle_config")
    fields = {**raw, **own} if isinstance(own, dict) else raw
    return architecture_of(model, where), ConfigFields(fields, where)


def _taken_layers(fields: ConfigFields, target: Architecture) -> list[int]:
    """The layers of the target before which EAGLE-3 takes the residual stream."""
    name, num_layers = "eagle_aux_hidden_state_layer_ids", target.num_layers
    given = fields.raw.get(name)
    if given is None or given == []:
        usual = [2, num_layers // 2, num_layers - 3]
        if min(usual) < 1:
            fields.fail(name, f"given, since a model of {num_layers} layers lacks the usual ones")
        return usual
    count = len(given) if isinstance(given, list) else 0
    layers = fields.integers(name, 1, num_layers, count)
    assert layers is not None
    return list(layers)


def _check_fits(
    name: str,
    head: Architecture,
    first: TensorInfo,
    width_in: int,
    target_name: str,
    target: Architecture,
    *,
    has_table: bool,
) -> None:
    """Check what shows that a head is another model's."""
    if not has_table and head.hidden_size != target.hidden_size:
        reason = f"it is {head.hidden_size:,} wide, the model {target.hidden_size:,}"
    elif first.shape[-1:] != (width_in,):
        reason = f"it takes {first.shape[-1]:,} values of hidden states, not {width_in:,}"
    else:
        return
    raise RequestError(
        f"{name} cannot draft for {target_name}: {reason}",
        param="spec",
        hint="the model that its page names",
    )


def _eagle(base: Architecture, found: Mapping[str, TensorInfo]) -> Architecture:
    eps = base.norm.eps
    has_bias = f"{JOIN}.bias" in found
    has_norm = f"{EMBEDDING_NORM}.weight" in found
    join = JoinSpec(
        NormSpec(EMBEDDING_NORM, eps) if has_norm else None,
        None,
        has_bias=has_bias,
        has_embedding=EMBEDDING in found,
        has_last_norm=f"{FINAL_NORM}.weight" in found,
    )
    return _with_join(base, found, join)


def _eagle3(
    fields: ConfigFields,
    base: Architecture,
    found: Mapping[str, TensorInfo],
    num_states: int,
    width: int,
) -> Architecture:
    eps = base.norm.eps
    norms = sorted(name for name in found if name.startswith(f"{_FUSION_NORM}."))
    fusion_norms = (NormSpec(name.removesuffix(".weight"), eps) for name in norms)
    head = found.get(f"{HEAD}.weight")
    join = JoinSpec(
        NormSpec(EMBEDDING_NORM, eps),
        NormSpec(HIDDEN_NORM, eps),
        num_drafted=head.shape[0] if head is not None and head.shape else None,
        drafted_as=DraftedAs.OFFSETS if DRAFTED in found else DraftedAs.ALL,
        is_wide=True,
        adds_normed=fields.flag("norm_before_residual"),
        fusion=FusionSpec(num_states, width, tuple(fusion_norms)),
        has_embedding=EMBEDDING in found,
    )
    return _with_join(base, found, join)


def _with_join(base: Architecture, found: Mapping[str, TensorInfo], join: JoinSpec) -> Architecture:
    """The architecture with the join; no layer's queries see the first place."""
    layers = [_hiding_first(found, i, plan) for i, plan in enumerate(base.layers)]
    if join.is_wide:
        first, *others = layers[0].places
        assert isinstance(first.block, AttentionSpec)
        wide = replace(
            first.block, linears=replace(first.block.linears, width_in=2 * base.hidden_size)
        )
        layers[0] = replace(layers[0], places=(replace(first, block=wide), *others))
    return replace(base, norm=replace(base.norm, name=FINAL_NORM), layers=tuple(layers), join=join)


def _hiding_first(found: Mapping[str, TensorInfo], index: int, plan: LayerPlan) -> LayerPlan:
    return replace(plan, places=tuple(_in_head(found, index, place) for place in plan.places))


def _in_head(found: Mapping[str, TensorInfo], index: int, place: Place) -> Place:
    """A block's place, whose first norm and biases are there if files have them."""
    if not isinstance(place.block, AttentionSpec):
        return place
    layer, norm = layer_name(index), place.norm
    assert norm is not None
    has_norm = index > 0 or f"{layer}.{norm.name}.weight" in found
    has_bias = f"{layer}.self_attn.q_proj.bias" in found
    linears = replace(place.block.linears, qkv_bias=has_bias)
    block = replace(place.block.hiding(1), linears=linears)
    return replace(place, norm=norm if has_norm else None, block=block)
