"""What a model is, as its `config.json` says: frozen and validated."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from localllm.errors import CheckpointError, brief

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base frequency and how it is stretched beyond the trained context."""

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    # Length of the context before stretching, which llama3 and yarn are defined against.
    original_max_position_embeddings: int = 2048
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


def architecture_name(raw: Mapping[str, Any], where: str) -> str:
    """The class name that a config.json gives. Raises: CheckpointError."""
    return _FieldReader(raw, where).architecture()


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and switches of a decoder, as `config.json` gives them, each within bounds."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    # Tokens a query may look back on, itself included; None: all. Which layers: see layer_windows.
    sliding_window: int | None
    use_sliding_window: bool
    max_window_layers: int | None
    layer_types: tuple[str, ...] | None
    dtype: DType
    eos_token_ids: tuple[int, ...] = ()
    quantization: Mapping[str, Any] | None = field(default=None, compare=False)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> "ModelConfig":
        """Read the hub's `config.json`, in the old or the new spelling.

        Raises: CheckpointError naming the field and the range it must lie in.
        """
        read = _FieldReader(raw, where)
        hidden_size = read.integer("hidden_size", 1, 1 << 20)
        num_heads = read.integer("num_attention_heads", 1, 4096)
        num_kv_heads = read.integer("num_key_value_heads", 1, 4096, default=num_heads)
        num_layers = read.integer("num_hidden_layers", 1, 1024)
        if num_heads % num_kv_heads:
            read.fail("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
        if raw.get("head_dim") is None and hidden_size % num_heads:
            read.fail("num_attention_heads", f"a divisor of hidden_size ({hidden_size})")
        head_dim = read.integer("head_dim", 2, 1024, default=hidden_size // num_heads)
        if head_dim % 2:
            read.fail("head_dim", "even")
        if raw.get("hidden_act", "silu") != "silu":
            read.fail("hidden_act", "'silu'")
        max_positions = read.integer("max_position_embeddings", 1, 1 << 28, default=2048)
        return cls(
            architecture=read.architecture(),
            vocab_size=read.integer("vocab_size", 1, 1 << 24),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size", 1, 1 << 22),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=max_positions,
            rms_norm_eps=read.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
            rope=_read_rope(raw, where, max_positions),
            tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
            attention_bias=read.flag("attention_bias", default=False),
            mlp_bias=read.flag("mlp_bias", default=False),
            sliding_window=read.optional_integer("sliding_window", 1, 1 << 28),
            use_sliding_window=read.flag("use_sliding_window", default=False),
            max_window_layers=read.optional_integer("max_window_layers", 0, 1024),
            layer_types=_read_layer_types(read, num_layers),
            dtype=_read_dtype(read),
            eos_token_ids=read_token_ids(raw.get("eos_token_id"), f"{where}: eos_token_id"),
            quantization=raw.get("quantization_config"),
        )


_REDOWNLOAD = "download the model again, or use another revision"


class _FieldReader:
    """Typed, bounded access to a JSON object that comes from a stranger."""

    def __init__(self, raw: Mapping[str, Any], where: str) -> None:
        self.raw, self.where = raw, where

    def fail(self, name: str, expected: str) -> NoReturn:
        raise CheckpointError(
            f"config field {name!r} must be {expected}, found {brief(self.raw.get(name))}",
            where=self.where,
            hint=_REDOWNLOAD,
        )

    def architecture(self) -> str:
        names = self.raw.get("architectures")
        if not isinstance(names, list) or not names or not isinstance(names[0], str):
            self.fail("architectures", "a list with the name of one")
        return str(names[0])

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            self.fail(name, f"a whole number from {low} to {high}")
        return value

    def optional_integer(self, name: str, low: int, high: int) -> int | None:
        return None if self.raw.get(name) is None else self.integer(name, low, high)

    def number(self, name: str, low: float, high: float, default: float | None = None) -> float:
        value = self.raw.get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(name, f"a number over {low:g} and at most {high:g}")
        if not low < value <= high:  # false for NaN
            self.fail(name, f"a number over {low:g} and at most {high:g}")
        return float(value)

    def optional_number(self, name: str, low: float, high: float) -> float | None:
        return None if self.raw.get(name) is None else self.number(name, low, high)

    def flag(self, name: str, default: bool) -> bool:
        value = self.raw.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.fail(name, "true or false")
        return bool(value)


def _read_dtype(read: _FieldReader) -> DType:
    value = read.raw.get("dtype") or read.raw.get("torch_dtype")
    if value is None:
        return "float32"
    for dtype in DTYPES:
        if value in (dtype, f"torch.{dtype}"):
            return dtype
    read.fail("dtype" if "dtype" in read.raw else "torch_dtype", f"one of {', '.join(DTYPES)}")


def _read_layer_types(read: _FieldReader, num_layers: int) -> tuple[str, ...] | None:
    value = read.raw.get("layer_types")
    if value is None:
        return None
    known = ("full_attention", "sliding_attention")
    if (
        not isinstance(value, list)
        or len(value) != num_layers
        or not all(kind in known for kind in value)
    ):
        read.fail("layer_types", f"a list of {num_layers} of {' or '.join(known)}")
    return tuple(value)


def _read_rope(raw: Mapping[str, Any], where: str, max_positions: int) -> RopeConfig:
    """Merge `rope_parameters` (new) or `rope_theta` + `rope_scaling` (old) into one row."""
    merged: dict[str, Any] = {"rope_theta": raw.get("rope_theta")}
    for name in ("rope_scaling", "rope_parameters"):
        part = raw.get(name)
        if part is None:
            continue
        if not isinstance(part, Mapping):
            raise CheckpointError(
                f"config field {name!r} must be an object, found {brief(part)}",
                where=where,
                hint=_REDOWNLOAD,
            )
        merged.update(part)
    kind = merged.get("rope_type", merged.get("type")) or "default"
    if kind not in ROPE_KINDS:
        raise CheckpointError(
            f"rope scaling {brief(kind)} is not supported; known: {', '.join(ROPE_KINDS)}",
            where=where,
            hint="another model of the family, or another engine for this one",
        )
    if raw.get("original_max_position_embeddings") is not None:
        merged["original_max_position_embeddings"] = raw["original_max_position_embeddings"]
    read = _FieldReader(merged, f"{where}: rope")
    original = read.integer("original_max_position_embeddings", 1, 1 << 28, default=max_positions)
    if kind == "yarn" and merged.get("factor") is None:
        merged["factor"] = max_positions / original
    if kind != "default" and merged.get("factor") is None:
        read.fail("factor", "a number (the rope type needs it)")
    for values in (merged, raw):
        if values.get("partial_rotary_factor") not in (None, 1, 1.0):
            _FieldReader(values, where).fail("partial_rotary_factor", "1.0 (no other is supported)")
    return RopeConfig(
        theta=read.number("rope_theta", 1.0, 1e12, default=10000.0),
        kind=kind,
        factor=read.number("factor", 1e-3, 1e6, default=1.0),
        low_freq_factor=read.number("low_freq_factor", 1e-3, 1e6, default=1.0),
        high_freq_factor=read.number("high_freq_factor", 1e-3, 1e6, default=4.0),
        beta_fast=read.number("beta_fast", 1e-3, 1e6, default=32.0),
        beta_slow=read.number("beta_slow", 1e-3, 1e6, default=1.0),
        original_max_position_embeddings=original,
        attention_factor=read.optional_number("attention_factor", 0.0, 1e6),
        mscale=read.optional_number("mscale", 0.0, 1e6),
        mscale_all_dim=read.optional_number("mscale_all_dim", 0.0, 1e6),
        truncate=read.flag("truncate", default=True),
    )


def read_token_ids(value: Any, where: str) -> tuple[int, ...]:
    """One token id, a list of them or null, as a tuple. Raises: CheckpointError."""
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < 1 << 31 for i in ids):
        raise CheckpointError(
            f"token ids must be whole numbers of at least 0, found {brief(value)}", where=where
        )
    return tuple(ids)
