"""The flags of the engine: device and precision, memory, prefix cache, and drafts."""

from dataclasses import dataclass
from typing import Annotated, Literal, cast

from localllm.cli.flags.groups import Flags, option
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
WEIGHT_KINDS = ("bf16", "int8", "int4", "fp8", "mxfp4", "mxfp4-experts")


@dataclass(frozen=True, slots=True)
class PrefixCacheFlags(Flags):
    """What is kept of prompts for later ones."""

    section = "Engine"

    no_prefix_cache: Annotated[
        bool, option("--no-prefix-cache", help="Do not reuse prefixes of earlier prompts.")
    ] = False
    cache_disk: Annotated[
        str | None,
        option(
            "--cache-disk",
            help="Keep prompts' keys and values on disk, up to SIZE.",
            metavar="SIZE",
        ),
    ] = None
    cache_dir: Annotated[
        str | None, option("--cache-dir", help="Folder of prompts' keys and values.", metavar="DIR")
    ] = None
    snapshot_memory: Annotated[
        str,
        option(
            "--snapshot-memory",
            help="Host memory for states of recurrent layers, from which other prompts go on.",
            metavar="SIZE",
        ),
    ] = "2GiB"


_WITH_CACHE = PrefixCacheFlags()


@dataclass(frozen=True, slots=True)
class DraftFlags(Flags):
    """How tokens are drafted, and how many."""

    section = "Drafts"

    spec: Annotated[
        str,
        option(
            "--spec",
            help="How tokens are drafted; several ways are joined by +.",
            choices=("auto", "ngram", "head", "eagle:HEAD", "draft:MODEL", "off"),
        ),
    ] = _SPECULATION.drafter
    spec_max: Annotated[int, option("--spec-max", help="Maximum tokens in a draft.")] = (
        _SPECULATION.max_draft
    )
    spec_ngram: Annotated[
        str,
        option("--spec-ngram", help="Tokens to match for an n-gram draft.", metavar="MIN:MAX"),
    ] = f"{_SPECULATION.min_match}:{_SPECULATION.max_match}"

    def config(self) -> SpeculationConfig:
        """The SpeculationConfig that the flags specify. Raises: RequestError."""
        return parse_speculation(self.spec, self.spec_max, self.spec_ngram)


@dataclass(frozen=True, slots=True)
class EngineFlags(Flags):
    """Sizes, device and precision of the engine."""

    section = "Engine"

    ctx: Annotated[
        str | None,
        option("-c", "--ctx", "--max-model-len", help="Context length: 4096, 32k or auto."),
    ] = None
    device: Annotated[
        str, option("--device", help="Device to compute on.", choices=("auto", "cuda", "cpu"))
    ] = "auto"
    threads: Annotated[
        int | None,
        option("--threads", help="Threads on a CPU; unset: one per core, fewer beside other work."),
    ] = None
    dtype: Annotated[
        str,
        option(
            "--dtype",
            help="Data type to compute in.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    backend: Annotated[
        str,
        option("--backend", help="Which operators to use.", choices=("auto", "torch", "triton")),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        option("--kv-cache-dtype", help="Data type of the KV cache.", choices=KV_CACHE_DTYPES),
    ] = "auto"
    state_dtype: Annotated[
        str,
        option(
            "--state-dtype",
            help="Data type of the states of recurrences; float16 halves their memory.",
            choices=STATE_DTYPES,
        ),
    ] = "float32"
    deterministic: Annotated[
        bool, option("--deterministic", help="Same bits in any batch, on a GPU too; slower there.")
    ] = False
    self_check: Annotated[
        bool,
        option(
            "--self-check/--no-self-check",
            help="Check a GPU's kernels before their first use.",
        ),
    ] = True
    gpu_memory_utilization: Annotated[
        float, option("--gpu-memory-utilization", help="Share of the free memory to use.")
    ] = 0.9
    reserve: Annotated[
        str | None,
        option("--reserve", help="Memory to leave free, such as 512MiB or 2GiB.", metavar="SIZE"),
    ] = None
    expert_memory: Annotated[
        str | None,
        option(
            "--expert-memory",
            help="GPU memory for experts (auto: what is left); the others stay in host memory.",
            metavar="auto|SIZE",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None, option("--max-num-seqs", help="Maximum requests in a batch.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None,
        option("--max-num-batched-tokens", help="Maximum tokens in a step (CPU 256, GPU 2048)."),
    ] = None

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
