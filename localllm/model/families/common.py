"""What most families have in common: sizes of attention and feed-forward, and norms before both."""

from collections.abc import Sequence

from localllm.model.architecture import Architecture
from localllm.model.blocks.attention import AttentionSpec
from localllm.model.blocks.gated_mlp import GatedMLPSpec
from localllm.model.config_fields import ConfigFields
from localllm.model.layer import LayerPlan, Place
from localllm.model.rope_config import read_rope


def read_attention(
    fields: ConfigFields,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    has_head_norms: bool = False,
    window: int | None = None,
) -> AttentionSpec:
    """Attention by the fields that all families call alike. Raises: CheckpointError."""
    hidden_size = _hidden_size(fields)
    num_heads = fields.integer("num_attention_heads", 1, 4096)
    num_kv_heads = fields.integer("num_key_value_heads", 1, 4096, default=num_heads)
    if num_heads % num_kv_heads:
        fields.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if fields.raw.get("head_dim") is None and hidden_size % num_heads:
        fields.fail("num_attention_heads", f"a divisor of hidden_size ({hidden_size})")
    head_dim = fields.integer("head_dim", 2, 1024, default=hidden_size // num_heads)
    if head_dim % 2:
        fields.fail("head_dim", "even")
    return AttentionSpec(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=read_rope(fields, _max_positions(fields)),
        window=window,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        has_head_norms=has_head_norms,
        eps=_eps(fields),
    )


def read_gated_mlp(fields: ConfigFields, *, has_bias: bool = False) -> GatedMLPSpec:
    """The feed-forward. Raises: CheckpointError for an activation other than SiLU."""
    if fields.raw.get("hidden_act", "silu") != "silu":
        fields.fail("hidden_act", "'silu'")
    inner_size = fields.integer("intermediate_size", 1, 1 << 22)
    return GatedMLPSpec(_hidden_size(fields), inner_size, has_bias)


def read_window(fields: ConfigFields) -> int | None:
    """Tokens that a query may look back on, itself included. Raises: CheckpointError."""
    return fields.optional_integer("sliding_window", 1, 1 << 28)


def read_opt_in_windows(fields: ConfigFields) -> list[int | None]:
    """The window of each layer where `use_sliding_window` asks for windows: by `layer_types`, or
    from `max_window_layers` on. Raises: CheckpointError.
    """
    fields = fields.with_defaults(sliding_window=4096, max_window_layers=28)
    num_layers = read_num_layers(fields)
    window, is_used = read_window(fields), fields.flag("use_sliding_window")
    kinds = ("full_attention", "sliding_attention")
    layer_types = fields.choices("layer_types", kinds, num_layers)
    first = fields.optional_integer("max_window_layers", 0, 1024) or 0
    if layer_types is None:
        layer_types = tuple(kinds[i >= first] for i in range(num_layers))
    return [window if is_used and kind == kinds[1] else None for kind in layer_types]


def read_num_layers(fields: ConfigFields) -> int:
    """How many layers there are. Raises: CheckpointError."""
    return fields.integer("num_hidden_layers", 1, 1024)


def pre_norm_layer(fields: ConfigFields, attention: AttentionSpec, mlp: GatedMLPSpec) -> LayerPlan:
    """Attention and feed-forward, each behind a norm of its own."""
    return LayerPlan(
        (Place("input_layernorm", attention), Place("post_attention_layernorm", mlp)),
        _hidden_size(fields),
        _eps(fields),
    )


def read_decoder(fields: ConfigFields, layers: Sequence[LayerPlan]) -> Architecture:
    """A whole decoder around its layers. Raises: CheckpointError."""
    return Architecture(
        name=fields.architecture(),
        vocab_size=fields.integer("vocab_size", 1, 1 << 24),
        hidden_size=_hidden_size(fields),
        max_position_embeddings=_max_positions(fields),
        rms_norm_eps=_eps(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        dtype=fields.dtype(),
        layers=tuple(layers),
        eos_token_ids=fields.token_ids("eos_token_id"),
        quantization=fields.raw.get("quantization_config"),
    )


def _hidden_size(fields: ConfigFields) -> int:
    return fields.integer("hidden_size", 1, 1 << 20)


def _max_positions(fields: ConfigFields) -> int:
    return fields.integer("max_position_embeddings", 1, 1 << 28, default=2048)


def _eps(fields: ConfigFields) -> float:
    return fields.number("rms_norm_eps", 0.0, 1.0, default=1e-6)
