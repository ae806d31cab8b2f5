"""The flags of the engine: what computes, in how much memory, from which cache, with drafts."""

from dataclasses import dataclass
from typing import Annotated, Literal, cast

from localllm.cli.flag_values import parse_context, parse_size, parse_speculation
from localllm.cli.flags import Flags, option
from localllm.engine.config import KV_CACHE_DTYPES, EngineConfig
from localllm.engine.speculation_config import SpeculationConfig

_SPECULATION = SpeculationConfig()
# What weights can be drawn or planned in; those of `random_weights`, whose module needs torch.
WEIGHT_KINDS = ("bf16", "int8", "int4", "fp8")


@dataclass(frozen=True, slots=True)
class PrefixCacheFlags(Flags):
    """What is kept of prompts for the next ones."""

    section = "Engine"

    no_prefix_cache: Annotated[
        bool, option("--no-prefix-cache", help="Share no prompt prefixes.")
    ] = False
    cache_disk: Annotated[
        str | None,
        option(
            "--cache-disk",
            help="Keep prompts' keys and values on disk, at most SIZE of them.",
            metavar="SIZE",
        ),
    ] = None
    cache_dir: Annotated[
        str | None, option("--cache-dir", help="Keep them in DIR.", metavar="DIR")
    ] = None


_WITH_CACHE = PrefixCacheFlags()


@dataclass(frozen=True, slots=True)
class DraftFlags(Flags):
    """Who drafts tokens, and how many."""

    section = "Drafts"

    spec: Annotated[
        str,
        option(
            "--spec", help="Who drafts tokens.", choices=("auto", "ngram", "draft:MODEL", "off")
        ),
    ] = _SPECULATION.drafter
    spec_max: Annotated[int, option("--spec-max", help="Tokens of a draft, at most.")] = (
        _SPECULATION.max_draft
    )
    spec_ngram: Annotated[
        str,
        option("--spec-ngram", help="Tokens to match for an n-gram draft.", metavar="MIN:MAX"),
    ] = f"{_SPECULATION.min_match}:{_SPECULATION.max_match}"

    def config(self) -> SpeculationConfig:
        """The SpeculationConfig they ask for. Raises: RequestError."""
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
        str, option("--device", help="What computes.", choices=("auto", "cuda", "cpu"))
    ] = "auto"
    threads: Annotated[
        int | None,
        option("--threads", help="Threads on a CPU; unset: one a core, fewer beside other work."),
    ] = None
    dtype: Annotated[
        str,
        option(
            "--dtype",
            help="What is computed in.",
            choices=("auto", "float32", "bfloat16", "float16"),
        ),
    ] = "auto"
    backend: Annotated[
        str,
        option("--backend", help="Whose operators compute.", choices=("auto", "torch", "triton")),
    ] = "auto"
    kv_cache_dtype: Annotated[
        str,
        option(
            "--kv-cache-dtype", help="What keys and values are kept in.", choices=KV_CACHE_DTYPES
        ),
    ] = "auto"
    deterministic: Annotated[
        bool, option("--deterministic", help="Same bits in any batch, on a GPU too; slower there.")
    ] = False
    self_check: Annotated[
        bool,
        option(
            "--self-check/--no-self-check",
            help="Check a GPU's kernels before their first use there.",
        ),
    ] = True
    gpu_memory_utilization: Annotated[
        float, option("--gpu-memory-utilization", help="Share of the free memory to use.")
    ] = 0.9
    reserve: Annotated[
        str | None,
        option("--reserve", help="Memory to leave free, as 512MiB or 2GiB.", metavar="SIZE"),
    ] = None
    max_num_seqs: Annotated[int | None, option("--max-num-seqs", help="Requests in one batch.")] = (
        None
    )
    max_num_batched_tokens: Annotated[
        int | None,
        option("--max-num-batched-tokens", help="Tokens in one step (CPU 256, GPU 2048)."),
    ] = None

    def config(
        self,
        default_max_num_seqs: int,
        speculation: SpeculationConfig = _SPECULATION,
        cache: PrefixCacheFlags = _WITH_CACHE,
    ) -> EngineConfig:
        """The EngineConfig they ask for. Raises: RequestError."""
        return EngineConfig(
            max_model_len=parse_context(self.ctx),
            gpu_memory_utilization=self.gpu_memory_utilization,
            reserve_bytes=0 if self.reserve is None else parse_size(self.reserve, "reserve"),
            deterministic=self.deterministic,
            speculation=speculation,
            max_num_seqs=default_max_num_seqs if self.max_num_seqs is None else self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            enable_prefix_caching=not cache.no_prefix_cache,
            cache_disk_bytes=parse_size(cache.cache_disk, "cache-disk") if cache.cache_disk else 0,
            cache_dir=cache.cache_dir,
            threads=self.threads,
            self_check=self.self_check,
            backend=cast(Literal["auto"], self.backend),
            device=cast(Literal["auto"], self.device),
            dtype=cast(Literal["auto"], self.dtype),
            kv_cache_dtype=cast(Literal["auto"], self.kv_cache_dtype),
        )
