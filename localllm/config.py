"""What a model is, how the engine runs it, and what one request wants: frozen and validated."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

from localllm.errors import CheckpointError, RequestError
from localllm.grammar import Grammar
from localllm.speculation_config import SpeculationConfig

DType = Literal["float32", "bfloat16", "float16"]
DTYPES: tuple[DType, ...] = ("float32", "bfloat16", "float16")
KVCacheDType = Literal["auto", "bf16", "int8", "fp8"]
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = ("auto", "bf16", "int8", "fp8")
RopeKind = Literal["default", "linear", "llama3", "yarn"]
ROPE_KINDS: tuple[RopeKind, ...] = ("default", "linear", "llama3", "yarn")

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS_ENTRIES = 1024
MAX_LOGPROBS = 20
MAX_NUM_SAMPLES = 8
MAX_THREADS = 256


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


def brief(value: object) -> str:
    """A value for a message: short, whatever a stranger put there."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"  # Python refuses to print much larger ones
    try:
        return repr(value)[:80]
    except (ValueError, RecursionError):
        return f"a {type(value).__name__}"


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


def _is_checked() -> bool:
    """Unless the variable says otherwise, which holds for Python, too."""
    return os.environ.get("LOCALLLM_SELF_CHECK", "").lower() not in ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine runs: sizes, device, precision. None means: decided when the model is known.

    `kv_cache_tokens` is the size of the KV cache in tokens, rounded down to whole blocks;
    `kv_cache_dtype` is what keys and values are kept in, "auto" the model's own dtype;
    `max_num_batched_tokens` is the token budget of one step; a device has its own where it is None.
    Of the free memory `gpu_memory_utilization` is used, and `reserve_bytes` are left at least.
    `deterministic` computes every row the same way, whatever it shares a step with.
    `self_check` holds a GPU's kernels against torch's operators before their first use there.
    `cache_disk_bytes` of prefixes are kept in `cache_dir` (None: in localllm's cache); 0: none.
    `threads` compute on a CPU; None: at most one for each core, fewer beside other work. Either way
    the engine sets the number of torch's threads (`torch.set_num_threads`) for the whole process.
    """

    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    reserve_bytes: int = 0
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    cache_disk_bytes: int = 0
    cache_dir: str | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    backend: Literal["auto", "torch", "triton"] = "auto"
    deterministic: bool = False
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    threads: int | None = None
    self_check: bool = field(default_factory=_is_checked)

    def __post_init__(self) -> None:
        for name, low in (
            ("max_model_len", 1),
            ("block_size", 1),
            ("kv_cache_tokens", 1),
            ("max_num_seqs", 1),
            ("max_num_batched_tokens", 1),
            ("threads", 1),
            ("reserve_bytes", 0),
            ("cache_disk_bytes", 0),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < low):
                raise RequestError(
                    f"{name} must be a whole number of at least {low}, found {brief(value)}",
                    param=name,
                )
        if self.threads is not None and self.threads > MAX_THREADS:
            raise RequestError(
                f"threads must be at most {MAX_THREADS}, found {self.threads}", param="threads"
            )
        if self.kv_cache_tokens is not None and self.kv_cache_tokens < self.block_size:
            raise RequestError(
                f"kv_cache_tokens must hold a block of {self.block_size} tokens, "
                f"found {self.kv_cache_tokens}",
                param="kv_cache_tokens",
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RequestError(
                f"gpu_memory_utilization must be over 0 and at most 1, "
                f"found {self.gpu_memory_utilization!r}",
                param="gpu_memory_utilization",
            )
        for name, known in (
            ("device", ("auto", "cuda", "cpu")),
            ("dtype", ("auto", *DTYPES)),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("backend", ("auto", "torch", "triton")),
        ):
            if getattr(self, name) not in known:
                raise RequestError(
                    f"{name} must be one of {', '.join(known)}, found {getattr(self, name)!r}",
                    param=name,
                )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request's tokens are chosen.

    Order of the filters: penalties, `logit_bias`, temperature, top-k, top-p, min-p. Temperature 0
    is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off. The penalties are those
    of OpenAI (presence, frequency: over generated tokens) and CTRL (repetition: over prompt and
    generated tokens). `logprobs` N reports the chosen token and the N likeliest, of the
    distribution before any filter. `seed` None draws one. `grammar`: what the answer has to be;
    tokens that it forbids are left out before anything else.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = None
    logprobs: int | None = None
    n: int = 1
    seed: int | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0.0, 100.0),
            ("top_p", 0.0, 1.0),
            ("min_p", 0.0, 1.0),
            ("repetition_penalty", 0.01, 100.0),
            ("presence_penalty", -2.0, 2.0),
            ("frequency_penalty", -2.0, 2.0),
        ):
            _check_number(name, getattr(self, name), low, high)
        if self.top_p == 0:
            raise RequestError("top_p must be over 0, found 0", param="top_p")
        _check_integer("top_k", self.top_k, 0, 1 << 31)
        _check_integer("n", self.n, 1, MAX_NUM_SAMPLES)
        if self.max_tokens is not None:
            _check_integer("max_tokens", self.max_tokens, 1, 1 << 31)
        if self.logprobs is not None:
            _check_integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.seed is not None:
            _check_integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        self._check_stops()
        self._check_logit_bias()

    def _check_stops(self) -> None:
        # A lone string is what everyone types first.
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        for name, value in (("stop", stop), ("stop_token_ids", self.stop_token_ids)):
            if not isinstance(value, (list, tuple, set, frozenset)):
                raise RequestError(f"{name} must be a list, found {brief(value)}", param=name)
            object.__setattr__(self, name, tuple(value))
        if len(self.stop) > MAX_STOP_STRINGS or not all(
            isinstance(text, str) and 0 < len(text) <= MAX_STOP_CHARS for text in self.stop
        ):
            raise RequestError(
                f"stop takes at most {MAX_STOP_STRINGS} strings "
                f"of 1 to {MAX_STOP_CHARS} characters",
                param="stop",
            )
        if len(self.stop_token_ids) > MAX_STOP_TOKEN_IDS:
            raise RequestError(
                f"stop_token_ids takes at most {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids"
            )
        for token_id in self.stop_token_ids:
            _check_integer("stop_token_ids", token_id, 0, 1 << 31)

    def _check_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias must map token ids to numbers, found {brief(self.logit_bias)}",
                param="logit_bias",
            )
        if len(self.logit_bias) > MAX_LOGIT_BIAS_ENTRIES:
            raise RequestError(
                f"logit_bias takes at most {MAX_LOGIT_BIAS_ENTRIES} entries", param="logit_bias"
            )
        for token_id, bias in self.logit_bias.items():
            _check_integer("logit_bias", token_id, 0, 1 << 31)
            _check_number("logit_bias", bias, -100.0, 100.0)


def _check_number(name: str, value: object, low: float, high: float) -> None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not low <= value <= high:  # type: ignore[operator]
        raise RequestError(
            f"{name} must be a number from {low:g} to {high:g}, found {brief(value)}", param=name
        )


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise RequestError(
            f"{name} must be a whole number from {low} to {high}, found {brief(value)}", param=name
        )
