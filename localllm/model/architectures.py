"""The supported architectures: one row of flags each, and the tensors a checkpoint must hold."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from localllm.errors import UnsupportedModelError
from localllm.files.json_file import read_json_object
from localllm.model.config import ModelConfig, architecture_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """What sets an architecture apart from the common decoder.

    `qkv_bias`, `o_bias`, `mlp_bias`: always, never, or as the config says. `sliding_window`:
    "never"; "all" layers where the config gives a window; or "opt_in", from `max_window_layers`
    on where `use_sliding_window` is set. `config_defaults`: fields that the hub's config class
    fills in when config.json leaves them out.
    """

    qkv_bias: bool | Literal["config"] = False
    o_bias: bool | Literal["config"] = False
    mlp_bias: bool | Literal["config"] = False
    qk_norm: bool = False
    sliding_window: Literal["never", "all", "opt_in"] = "never"
    config_defaults: Mapping[str, Any] = field(default_factory=dict)


_QWEN_DEFAULTS = {"sliding_window": 4096, "max_window_layers": 28}

ARCHITECTURES: dict[str, ArchSpec] = {
    "LlamaForCausalLM": ArchSpec(qkv_bias="config", o_bias="config", mlp_bias="config"),
    "MistralForCausalLM": ArchSpec(sliding_window="all", config_defaults={"sliding_window": 4096}),
    "Qwen2ForCausalLM": ArchSpec(
        qkv_bias=True, sliding_window="opt_in", config_defaults=_QWEN_DEFAULTS
    ),
    "Qwen3ForCausalLM": ArchSpec(
        qkv_bias="config",
        o_bias="config",
        qk_norm=True,
        sliding_window="opt_in",
        config_defaults=_QWEN_DEFAULTS,
    ),
}


@dataclass(frozen=True, slots=True)
class Biases:
    """Which linears carry a bias, the config taken into account."""

    qkv: bool
    o: bool
    mlp: bool


def find_architecture(name: str, where: str = "config.json") -> ArchSpec:
    """The row of an architecture. Raises: UnsupportedModelError naming those supported."""
    if name not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"architecture {name!r:.80} is not supported; supported: {', '.join(ARCHITECTURES)}",
            where=where,
            hint="another model, or vLLM for this one (it supports the widest set)",
        )
    return ARCHITECTURES[name]


def read_model_config(folder: Path) -> tuple[ModelConfig, ArchSpec]:
    """Config and architecture of the checkpoint in `folder`; code in it is never run.

    Raises: CheckpointError, UnsupportedModelError.
    """
    path = folder / "config.json"
    raw = read_json_object(path)
    name = architecture_name(raw, str(path))
    spec = find_architecture(name, str(path))
    if "auto_map" in raw:
        logger.warning("code in the model's folder is not run; the built-in %s is used", name)
    return ModelConfig.from_hf({**spec.config_defaults, **raw}, str(path)), spec


def resolve_biases(config: ModelConfig, spec: ArchSpec) -> Biases:
    """Merge the row's flags with the config's."""
    return Biases(
        qkv=config.attention_bias if spec.qkv_bias == "config" else spec.qkv_bias,
        o=config.attention_bias if spec.o_bias == "config" else spec.o_bias,
        mlp=config.mlp_bias if spec.mlp_bias == "config" else spec.mlp_bias,
    )


def layer_windows(config: ModelConfig, spec: ArchSpec) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where a token attends to everything before it."""
    window = config.sliding_window
    if spec.sliding_window == "opt_in" and not config.use_sliding_window:
        window = None
    if spec.sliding_window == "never" or window is None:
        return (None,) * config.num_layers
    if spec.sliding_window == "all":
        return (window,) * config.num_layers
    if config.layer_types is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in config.layer_types)
    first = config.max_window_layers or 0
    return tuple(window if i >= first else None for i in range(config.num_layers))


def layer_linears(config: ModelConfig, spec: ArchSpec) -> dict[str, tuple[int, int, bool]]:
    """The linears of a layer by their name in it: output width, input width, whether with bias."""
    biases = resolve_biases(config, spec)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (q_width, hidden, biases.qkv),
        "self_attn.k_proj": (kv_width, hidden, biases.qkv),
        "self_attn.v_proj": (kv_width, hidden, biases.qkv),
        "self_attn.o_proj": (hidden, q_width, biases.o),
        "mlp.gate_proj": (inner, hidden, biases.mlp),
        "mlp.up_proj": (inner, hidden, biases.mlp),
        "mlp.down_proj": (hidden, inner, biases.mlp),
    }


def linear_shapes(config: ModelConfig, spec: ArchSpec) -> dict[str, tuple[int, int]]:
    """Every linear by its full name, the head included where it is one of its own: (out, in)."""
    shapes = {
        f"model.layers.{i}.{name}": (width_out, width_in)
        for i in range(config.num_layers)
        for name, (width_out, width_in, _) in layer_linears(config, spec).items()
    }
    if not config.tie_word_embeddings:
        shapes["lm_head"] = (config.vocab_size, config.hidden_size)
    return shapes


def expected_tensors(config: ModelConfig, spec: ArchSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor an unquantized checkpoint must hold, and nothing beside.

    With tied embeddings the head is the embedding table; a stored head is accepted and ignored.
    """
    hidden = config.hidden_size
    linears = layer_linears(config, spec)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        for name, (width_out, width_in, has_bias) in linears.items():
            shapes[f"{layer}.{name}.weight"] = (width_out, width_in)
            if has_bias:
                shapes[f"{layer}.{name}.bias"] = (width_out,)
        if spec.qk_norm:
            shapes[f"{layer}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{layer}.self_attn.k_norm.weight"] = (config.head_dim,)
        shapes[f"{layer}.input_layernorm.weight"] = (hidden,)
        shapes[f"{layer}.post_attention_layernorm.weight"] = (hidden,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes
