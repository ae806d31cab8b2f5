"""What most families share: sizes of attention and feed-forward, and a norm before each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from localllm.model.architecture import FINAL_NORM, Architecture
from localllm.model.blocks.attention import AttentionLinears, AttentionSpec, QueryKeyNorms
from localllm.model.blocks.block import BlockSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.layer import LayerPlan, Place
from localllm.model.norm import NormSpec
from localllm.model.rope_config import RopeConfig, read_rope

if TYPE_CHECKING:
    from localllm_kernels.pointwise.gate import GateKind

SLIDING, FULL = "sliding_attention", "full_attention"
# By the names of activations in transformers; those of a kind compute the same.
_GATES: Mapping[str, "GateKind"] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_accurate": "gelu",
}


def read_attention(
    fields: ConfigFields,
    *,
    has_bias: bool = False,
    qkv_bias: bool = False,
    o_bias: bool = False,
    norms: QueryKeyNorms | None = None,
    window: int | None = None,
) -> AttentionSpec:
    """Attention from the fields that all families name alike. Raises: CheckpointError."""
    hidden_size = fields.hidden_size()
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    num_kv_heads = fields.integer("num_key_value_heads", 1, 4096, default=num_heads)
    if num_heads % num_kv_heads:
        fields.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if fields.get("head_dim") is None and hidden_size % num_heads:
        fields.fail("num_attention_heads", f"a divisor of hidden_size ({hidden_size})")
    head_dim = fields.integer("head_dim", 2, 1024, default=hidden_size // num_heads)
    if head_dim % 2:
        fields.fail("head_dim", "even")
    rope = read_rope(fields, fields.max_positions())
    if fields.flag("rope_interleave"):  # what GGUF files of some families are read as
        rope = replace(rope, is_interleaved=True)
    if rope.rotary_width(head_dim) % 2:
        fields.fail("partial_rotary_factor", f"such that an even part of {head_dim} turns")
    check_pair_factors(fields, rope, head_dim)
    return AttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=rope,
        window=window,
        norms=norms,
        linears=AttentionLinears(qkv_bias=has_bias or qkv_bias, o_bias=has_bias or o_bias),
    )


def check_pair_factors(fields: ConfigFields, rope: RopeConfig, head_dim: int) -> None:
    """Raises: CheckpointError for longrope without a factor for each pair of heads that turns."""
    pairs = rope.rotary_width(head_dim) // 2
    for factors in (rope.short_factors, rope.long_factors):
        if rope.kind == "longrope" and len(factors) != pairs:
            fields.fail("rope_scaling", f"an object whose factors are lists of {pairs} numbers")


def read_gated_mlp(fields: ConfigFields, *, has_bias: bool = False) -> GatedMLPSpec:
    """The feed-forward. Raises: CheckpointError for an unknown activation."""
    activation = fields.get("hidden_act") or "silu"
    if not isinstance(activation, str) or activation not in _GATES:
        fields.refuse_value("hidden_act", " or ".join(map(repr, _GATES)))
    inner_size = fields.integer("intermediate_size", 1, 1 << 22)
    return GatedMLPSpec(
        fields.hidden_size(),
        inner_size,
        has_bias,
        gate=_GATES[activation],
    )


def read_kinds(
    fields: ConfigFields, known: tuple[str, ...], usual: Callable[[int], str]
) -> list[str]:
    """The kind of each layer, one of `known`: by `layer_types`, else the `usual` one at its place.

    Raises: CheckpointError.
    """
    num_layers = fields.num_layers()
    found = fields.choices("layer_types", known, num_layers)
    return [usual(i) for i in range(num_layers)] if found is None else list(found)


def read_windowed_layers(fields: ConfigFields, every: int) -> list[bool]:
    """Of each layer whether it has a window: by `layer_types`, else all but one of `every` layers.

    Raises: CheckpointError.
    """
    kinds = read_kinds(fields, (FULL, SLIDING), lambda i: SLIDING if (i + 1) % every else FULL)
    return [kind == SLIDING for kind in kinds]


def pre_norm_layer(
    fields: ConfigFields,
    mixer: BlockSpec,
    mlp: BlockSpec,
    shared: BlockSpec | None = None,
    *,
    scale: float = 1.0,
    names: Sequence[str] = ("input_layernorm", "post_attention_layernorm"),
    norm: NormSpec | None = None,
) -> LayerPlan:
    """A mixer of tokens and a feed-forward, each after its own norm; `shared`: a second
    feed-forward beside experts; `scale`: of their outputs; `names`: of the norms; `norm`: an
    unusual final one, of the kind of all.
    """
    first, second = _norms(fields, names, norm)
    places = [Place(first, mixer, scale=scale)]
    places.append(Place(second, mlp, scale=scale, shares_input=shared is not None))
    if shared is not None:
        places.append(Place(None, shared, scale=scale))
    return LayerPlan(tuple(places), fields.hidden_size())


def refuse_step_limits(fields: ConfigFields) -> None:
    """Limits on Mamba's steps, where they are any. Raises: UnsupportedModelError."""
    limits = fields.get("time_step_limit")
    if limits not in (None, [0.0, float("inf")]):
        fields.refuse("limits on the steps of Mamba are")


def read_expert(fields: ConfigFields, inner: str, names: tuple[str, str, str]) -> GatedMLPSpec:
    """One of a layer's experts; `inner`: the field with its inner size. Raises: CheckpointError."""
    inner_size = fields.integer(inner, 1, 1 << 22)
    mlp = read_gated_mlp(fields.changed({"intermediate_size": inner_size}))
    return replace(mlp, names=names)


def post_norm_layer(
    fields: ConfigFields,
    attention: AttentionSpec,
    mlp: GatedMLPSpec,
    norm: NormSpec | None = None,
) -> LayerPlan:
    """Attention and feed-forward, each before its own norm; `norm`: see `pre_norm_layer`."""
    names = ("post_attention_layernorm", "post_feedforward_layernorm")
    first, second = _norms(fields, names, norm)
    places = (Place(None, attention, first), Place(None, mlp, second))
    return LayerPlan(places, fields.hidden_size())


def sandwich_layer(
    fields: ConfigFields,
    mixer: BlockSpec,
    mlp: BlockSpec,
    names: Sequence[str],
    norm: NormSpec | None = None,
) -> LayerPlan:
    """A mixer of tokens and a feed-forward, each between two norms; `names`: of the four, in order;
    `norm`: see `pre_norm_layer`.
    """
    before, after, second_before, second_after = _norms(fields, names, norm)
    places = (Place(before, mixer, after), Place(second_before, mlp, second_after))
    return LayerPlan(places, fields.hidden_size())


def _norms(fields: ConfigFields, names: Sequence[str], norm: NormSpec | None) -> Iterator[NormSpec]:
    kind = norm or NormSpec(FINAL_NORM, fields.eps())
    return (replace(kind, name=name) for name in names)


def read_decoder(
    fields: ConfigFields,
    layers: Sequence[LayerPlan],
    *,
    norm: NormSpec | None = None,
    embedding_scale: float = 1.0,
    logit_scale: float = 1.0,
    logit_cap: float | None = None,
) -> Architecture:
    """A decoder around its layers; `norm`: an unusual final one. Raises: CheckpointError."""
    return Architecture(
        name=fields.architecture(),
        vocab_size=fields.integer("vocab_size", 1, 1 << 24),
        hidden_size=fields.hidden_size(),
        max_position_embeddings=fields.max_positions(),
        norm=norm or NormSpec(FINAL_NORM, fields.eps()),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=fields.dtype(),
        layers=tuple(layers),
        start_token_ids=fields.token_ids("bos_token_id"),
        eos_token_ids=fields.token_ids("eos_token_id"),
        embedding_scale=embedding_scale,
        logit_scale=logit_scale,
        logit_cap=logit_cap,
        quantization=fields.get("quantization_config"),
    )


def read_uniform_decoder(fields: ConfigFields, mixer: BlockSpec, mlp: BlockSpec) -> Architecture:
    """A decoder whose layers are all alike. Raises: CheckpointError."""
    layer = pre_norm_layer(fields, mixer, mlp)
    return read_decoder(fields, [layer] * fields.num_layers())
