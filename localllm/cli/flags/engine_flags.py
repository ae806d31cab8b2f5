"""The flags of the engine: device and precision, memory, prefix cache, and drafts."""

from dataclasses import dataclass
from typing import Literal, cast

from localllm.cli.flags.groups import Flags, setting
from localllm.cli.flags.values import (
    parse_context,
    parse_expert_memory,
    parse_size,
    parse_speculation,
)
from localllm.drafting.speculation_config import SpeculationConfig
from localllm.engine.config import KV_CACHE_DTYPES, EngineConfig
from localllm.model.dtypes import STATE_DTYPES

_SPECULATION = SpeculationConfig()
# Formats for random weights and for plans; as in `random_weights`, whose module imports torch.
WEIGHT_KINDS = ("bf16", "int8", "int4", "fp8", "mxfp4", "nvfp4", "trellis3", "mxfp4-experts")


@dataclass(frozen=True, slots=True)
class PrefixCacheFlags(Flags):
    """What is kept of prompts for later ones."""

    section = "Engine"

    no_prefix_cache: bool = setting(False, help="Do not reuse prefixes of earlier prompts.")
    cache_disk: str | None = setting(
        help="Keep prompts' keys and values on disk, up to SIZE.", metavar="SIZE"
    )
    cache_dir: str | None = setting(help="Folder of prompts' keys and values.", metavar="DIR")
    snapshot_memory: str = setting(
        "2GiB",
        help="Host memory for states of recurrent layers, from which other prompts go on.",
        metavar="SIZE",
    )


_WITH_CACHE = PrefixCacheFlags()


@dataclass(frozen=True, slots=True)
class DraftFlags(Flags):
    """How tokens are drafted, and how many."""

    section = "Drafts"

    spec: str = setting(
        _SPECULATION.drafter,
        help="How tokens are drafted; several ways are joined by +.",
        choices=("auto", "ngram", "head", "eagle:HEAD", "draft:MODEL", "off"),
    )
    spec_max: int = setting(_SPECULATION.max_draft, help="Maximum tokens in a draft.")
    spec_ngram: str = setting(
        f"{_SPECULATION.min_match}:{_SPECULATION.max_match}",
        help="Tokens to match for an n-gram draft.",
        metavar="MIN:MAX",
    )

    def config(self) -> SpeculationConfig:
        """The SpeculationConfig that the flags specify. Raises: RequestError."""
        return parse_speculation(self.spec, self.spec_max, self.spec_ngram)


@dataclass(frozen=True, slots=True)
class EngineFlags(Flags):
    """Sizes, device and precision of the engine."""

    section = "Engine"

    ctx: str | None = setting(
        None, "-c", "--ctx", "--max-model-len", help="Context length: 4096, 32k or auto."
    )
    device: str = setting("auto", help="Device to compute on.", choices=("auto", "cuda", "cpu"))
    threads: int | None = setting(
        help="Threads on a CPU; unset: one per core, fewer beside other work."
    )
    dtype: str = setting(
        "auto", help="Data type to compute in.", choices=("auto", "float32", "bfloat16", "float16")
    )
    backend: str = setting(
        "auto", help="Which operators to use.", choices=("auto", "torch", "triton")
    )
    kv_cache_dtype: str = setting(
        "auto", help="Data type of the KV cache.", choices=KV_CACHE_DTYPES
    )
    state_dtype: str = setting(
        "float32",
        help="Data type of the states of recurrences; float16 halves their memory.",
        choices=STATE_DTYPES,
    )
    deterministic: bool = setting(False, help="Same bits in any batch, on a GPU too; slower there.")
    self_check: bool = setting(
        True, "--self-check/--no-self-check", help="Check a GPU's kernels before their first use."
    )
    gpu_memory_utilization: float = setting(0.9, help="Share of the free memory to use.")
    reserve: str | None = setting(
        help="Memory to leave free, such as 512MiB or 2GiB.", metavar="SIZE"
    )
    expert_memory: str | None = setting(
        help="GPU memory for experts (auto: what is left); the others stay in host memory.",
        metavar="auto|SIZE",
    )
    max_num_seqs: int | None = setting(help="Maximum requests in a batch.")
    max_num_batched_tokens: int | None = setting(
        help="Maximum tokens in a step (CPU 256, GPU 2048)."
    )

    def config(
        self,
        default_max_num_seqs: int,
        speculation: SpeculationConfig = _SPECULATION,
        cache: PrefixCacheFlags = _WITH_CACHE,
    ) -> EngineConfig:
        """The EngineConfig that the flags specify. Raises: RequestError."""
        return EngineConfig(
            max_model_len=parse_context(self.ctx),
            gpu_memory_utilization=self.gpu_memory_utilization,
            reserve_bytes=0 if self.reserve is None else parse_size(self.reserve, "reserve"),
            expert_memory_bytes=parse_expert_memory(self.expert_memory),
            deterministic=self.deterministic,
            speculation=speculation,
            max_num_seqs=default_max_num_seqs if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=not cache.no_prefix_cache,
            cache_disk_bytes=parse_size(cache.cache_disk, "cache-disk") if cache.cache_disk else 0,
            cache_dir=cache.cache_dir,
            snapshot_bytes=parse_size(cache.snapshot_memory, "snapshot-memory"),
            threads=self.threads,
            self_check=self.self_check,
            backend=cast(Literal["auto"], self.backend),
            device=cast(Literal["auto"], self.device),
            dtype=cast(Literal["auto"], self.dtype),
            kv_cache_dtype=cast(Literal["auto"], self.kv_cache_dtype),
            state_dtype=cast(Literal["float32"], self.state_dtype),
        )
