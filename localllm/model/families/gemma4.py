"""Gemma 4's text models: full layers have heads of another size and number than windowed ones, and
may take keys as values; the last layers may read the keys and values of earlier ones; a token may
bring an input of its own to each layer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from localllm.model.architecture import FINAL_NORM, Architecture
from localllm.model.blocks.attention import AttentionSpec, QueryKeyNorms, Scores
from localllm.model.blocks.experts import ExpertsSpec, StackedNames
from localllm.model.blocks.experts_beside import ExpertsBesideSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.per_layer_gate import PerLayerGateSpec
from localllm.model.blocks.router import RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import (
    FULL,
    SLIDING,
    read_attention,
    read_decoder,
    read_expert,
    read_gated_mlp,
    read_windowed_layers,
    sandwich_layer,
)
from localllm.model.families.gemma3 import NORMS, gated_by_hidden_activation
from localllm.model.layer import LayerPlan, Place
from localllm.model.norm import NormSpec
from localllm.model.per_layer_inputs import PerLayerSpec
from localllm.model.rope_config import read_rope


def read_gemma4(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError, UnsupportedModelError."""
    fields.only("use_bidirectional_attention", False, "vision")
    fields = gated_by_hidden_activation(fields)
    attentions = _read_attentions(fields)
    mlp, eps, width = read_gated_mlp(fields), fields.eps(), fields.hidden_size()
    wide = replace(mlp, inner_size=2 * mlp.inner_size)
    is_wide = fields.flag("use_double_wide_mlp")
    per_layer, experts = _read_per_layer(fields), _read_experts(fields)
    norm, layers = NormSpec(FINAL_NORM, eps, rounds_last=True), []
    for each in attentions:
        own = wide if is_wide and each.reads is not None else mlp
        plan = sandwich_layer(fields, each, own, NORMS, norm)
        layers.append(_completed(plan, own, experts, per_layer, norm))
    return replace(
        read_decoder(
            fields,
            layers,
            norm=norm,
            embedding_scale=width**0.5,
            logit_cap=fields.optional_number("final_logit_softcapping", 0.0, 1e6),
        ),
        per_layer=per_layer,
    )


def _completed(
    plan: LayerPlan,
    mlp: GatedMLPSpec,
    experts: ExpertsSpec | None,
    per_layer: PerLayerSpec | None,
    norm: NormSpec,
) -> LayerPlan:
    """A layer with experts beside its feed-forward, and an input of its own, if there are any."""
    places = [*plan.places]
    if experts is not None:
        before, after = "pre_feedforward_layernorm", "post_feedforward_layernorm"
        names = (before, f"{after}_1", f"{before}_2", f"{after}_2")
        first, second, third, last = (replace(norm, name=name) for name in names)
        both = ExpertsBesideSpec(mlp, experts, (first, second, third, last), "router.scale")
        places[-1] = Place(None, both, replace(norm, name=after))
    if per_layer is not None:
        gate = PerLayerGateSpec(plan.hidden_size, per_layer.width)
        places.append(Place(None, gate, replace(norm, name="post_per_layer_input_norm")))
    places[-1] = replace(places[-1], factor="layer_scalar")
    return replace(plan, places=tuple(places))


def _read_experts(fields: ConfigFields) -> ExpertsSpec | None:
    if not fields.flag("enable_moe_block"):
        return None
    num_experts = fields.integer("num_experts", 1, 1 << 16)
    router = RouterSpec(
        num_experts,
        fields.integer("top_k_experts", 1, num_experts),
        linear="router.proj",
        renormalises=True,
        scales="router.per_expert_scale",
    )
    names = ("experts.{}.gate_proj", "experts.{}.up_proj", "experts.{}.down_proj")
    return ExpertsSpec(
        read_expert(fields, "moe_intermediate_size", names),
        router,
        stacked=StackedNames("experts.gate_up_proj", "experts.down_proj"),
    )


def _read_per_layer(fields: ConfigFields) -> PerLayerSpec | None:
    # The class for 12B has no such inputs, and no field for them.
    default = 256 if fields.architecture() == "Gemma4ForCausalLM" else 0
    width = fields.integer("hidden_size_per_layer_input", 0, 1 << 16, default=default)
    if width == 0:
        return None
    tokens = fields.integer("vocab_size_per_layer_input", 1, 1 << 24, default=262144)
    return PerLayerSpec(tokens, width, fields.eps())


def _read_attentions(fields: ConfigFields) -> Sequence[AttentionSpec]:
    has_bias, positions = fields.flag("attention_bias"), fields.max_positions()
    norms = QueryKeyNorms(fields.eps(), rounds_last=True, has_value=True)
    own = replace(read_attention(fields, has_bias=has_bias, norms=norms), scores=Scores(1.0))
    windowed = replace(own, rope=read_rope(fields, positions, SLIDING), window=fields.window())
    takes_keys = fields.flag("attention_k_eq_v")
    full = replace(own, rope=read_rope(fields, positions, FULL), has_values=not takes_keys)
    kinds = read_windowed_layers(fields, every=6)
    kinds[-1] = False
    found = [
        _with_own_heads(fields, windowed if is_windowed else full, i)
        for i, is_windowed in enumerate(kinds)
    ]
    num_layers = fields.num_layers()
    num_readers = fields.integer("num_kv_shared_layers", 0, num_layers, default=0)
    sources = dict(zip(kinds[: num_layers - num_readers], range(num_layers), strict=False))
    for i in range(num_layers - num_readers, num_layers):
        if kinds[i] not in sources:
            fields.fail("num_kv_shared_layers", "fewer: a layer of each kind must have keys")
        found[i] = replace(found[sources[kinds[i]]], reads=sources[kinds[i]])
    return found


def _with_own_heads(fields: ConfigFields, attention: AttentionSpec, index: int) -> AttentionSpec:
    """`attention` with the heads that the config names for its kind of layer, or for this layer."""
    by_layer = fields.get("per_layer_config")
    sizes: Mapping[str, Any] = {}
    if by_layer is not None:
        if not isinstance(by_layer, dict):
            fields.fail("per_layer_config", "an object")
        # Numbers may have a zero before them.
        own = {int(number): each for number, each in by_layer.items() if number.isdecimal()}
        sizes = own[index] if isinstance(own.get(index), dict) else {}
    elif attention.window is None:
        num_keys = None if attention.has_values else fields.get("num_global_key_value_heads")
        sizes = {
            "head_dim": fields.get("global_head_dim", 512),
            "num_key_value_heads": num_keys,
        }
    given_sizes = {name: value for name, value in sizes.items() if value is not None}
    own_heads = read_attention(fields.changed(given_sizes))
    return replace(attention, head_dim=own_heads.head_dim, num_kv_heads=own_heads.num_kv_heads)
