"""Nemotron-H: each layer is one block behind a norm, of Mamba-2, attention without a rotation, a
feed-forward with relu², or experts of the same kind beside one that all rows share.
"""

from dataclasses import replace

from localllm.model.architecture import FINAL_NORM, Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.experts import ExpertsSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.blocks.latent_experts import LatentExpertsSpec
from localllm.model.blocks.mamba import MambaSpec
from localllm.model.blocks.router import Groups, RouterSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.families.common import FULL, read_attention, read_decoder, refuse_step_limits
from localllm.model.layer import LayerPlan, Place
from localllm.model.norm import NormSpec
from localllm.model.rope_config import NO_ROPE

_MAMBA, _EXPERTS, _MLP = "linear_attention", "moe", "mlp"
# As they are called in lists of layers, new and old, and in patterns.
_KINDS = {
    "mamba": _MAMBA,
    "attention": FULL,
    **{kind: kind for kind in (_MAMBA, FULL, _EXPERTS, _MLP)},
    **{"M": _MAMBA, "*": FULL, "E": _EXPERTS, "-": _MLP},
}
_DEFAULT = (_MAMBA, _EXPERTS, FULL, _MLP)


def read_nemotron_h(fields: ConfigFields) -> Architecture:
    """Raises: CheckpointError, UnsupportedModelError."""
    kinds, eps = _read_kinds(fields), fields.number("layer_norm_epsilon", 0.0, 1.0, default=1e-5)
    plans = {kind: _read_layer(fields, kind, eps) for kind in dict.fromkeys(kinds)}
    return read_decoder(fields, [plans[kind] for kind in kinds], norm=NormSpec(FINAL_NORM, eps))


def _read_layer(fields: ConfigFields, kind: str, eps: float) -> LayerPlan:
    norm, places = NormSpec("norm", eps), list[Place]()
    match kind:
        case "linear_attention":
            places.append(Place(norm, _read_mamba(fields, eps)))
        case "full_attention":
            places.append(Place(norm, _read_attention(fields)))
        case "mlp":
            places.append(Place(norm, _read_mlp(fields, "intermediate_size", "mixer.")))
        case _:
            experts, shared = _read_experts(fields)
            places += [Place(norm, experts, shares_input=True), Place(None, shared)]
    return LayerPlan(tuple(places), fields.hidden_size())


def _read_kinds(fields: ConfigFields) -> list[str]:
    """The kind of each layer, by a list, or by a pattern of one character for each."""
    for name in ("layers_block_type", "layer_types", "hybrid_override_pattern"):
        found = fields.get(name)
        if found is not None:
            known = isinstance(found, list | str) and all(
                isinstance(each, str) and each in _KINDS for each in found
            )
            if not known or not found:
                fields.fail(name, f"one of {', '.join(map(repr, _KINDS))} for each layer")
            return [_KINDS[each] for each in found]
    return list(_DEFAULT)


def _read_mamba(fields: ConfigFields, eps: float) -> MambaSpec:
    refuse_step_limits(fields)
    fields.only("mamba_hidden_act", "silu", "swish")
    num_heads = fields.integer("mamba_num_heads", 1, 1 << 16, default=128)
    num_groups = fields.integer("n_groups", 1, num_heads, default=8)
    if num_heads % num_groups:
        fields.fail("n_groups", f"a divisor of mamba_num_heads ({num_heads})")
    return MambaSpec(
        fields.hidden_size(),
        num_heads,
        fields.integer("mamba_head_dim", 1, 1 << 16, default=64),
        num_groups,
        fields.integer("ssm_state_size", 1, 1 << 16, default=128),
        fields.integer("conv_kernel", 2, 64, default=4),
        eps,
        has_bias=fields.flag("use_bias"),
        has_conv_bias=fields.flag("use_conv_bias", default=True),
        name="mixer",
    )


def _read_attention(fields: ConfigFields) -> AttentionSpec:
    own = {} if "head_dim" in fields.raw else {"head_dim": 128}
    attention = read_attention(fields.changed(own))
    linears = replace(attention.linears, name="mixer", output="mixer.o_proj")
    return replace(attention, rope=NO_ROPE, linears=linears)


def _read_mlp(fields: ConfigFields, inner: str, own: str) -> GatedMLPSpec:
    fields.only("mlp_hidden_act", "relu2")
    return GatedMLPSpec(
        fields.hidden_size(),
        fields.integer(inner, 1, 1 << 22),
        fields.flag("mlp_bias"),
        (f"{own}up_proj", f"{own}down_proj"),
        gate="relu2",
    )


def _read_experts(
    fields: ConfigFields,
) -> tuple[ExpertsSpec | LatentExpertsSpec, GatedMLPSpec]:
    num_experts, top_k = fields.num_experts("n_routed_experts")
    count = fields.integer("n_group", 1, num_experts, default=1)
    if num_experts % count or (count > 1 and num_experts < 2 * count):
        fields.fail("n_group", f"a divisor of n_routed_experts ({num_experts}), two in each")
    router = RouterSpec(
        num_experts,
        top_k,
        linear="mixer.gate",
        is_sigmoid=True,
        renormalises=fields.flag("norm_topk_prob", default=True),
        factor=fields.routed_factor(),
        groups=None if count == 1 else Groups(count, fields.integer("topk_group", 1, count)),
        correction="mixer.gate.e_score_correction_bias",
    )
    expert = _read_mlp(fields, "moe_intermediate_size", "mixer.experts.{}.")
    expert = replace(expert, has_bias=False)
    shared = _read_mlp(fields, "moe_shared_expert_intermediate_size", "mixer.shared_experts.")
    if fields.get("moe_latent_size") is None:
        return ExpertsSpec(expert, router), shared
    latent = replace(expert, hidden_size=fields.integer("moe_latent_size", 1, 1 << 20))
    names = "mixer.fc1_latent_proj", "mixer.fc2_latent_proj"
    experts = LatentExpertsSpec(
        fields.hidden_size(), ExpertsSpec(latent, router), fields.flag("mlp_bias"), *names
    )
    return experts, shared
