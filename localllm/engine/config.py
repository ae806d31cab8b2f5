"""Configuration of the engine: sizes, device, precision."""

import os
from dataclasses import dataclass, field
from typing import Literal

from localllm.drafting.speculation_config import SpeculationConfig
from localllm.errors import RequestError, brief
from localllm.model.dtypes import DTYPES, STATE_DTYPES, StateDType

KVCacheDType = Literal["auto", "bf16", "int8", "fp8", "int4"]
KV_CACHE_DTYPES: tuple[KVCacheDType, ...] = ("auto", "bf16", "int8", "fp8", "int4")
MAX_THREADS = 256


def _is_checked() -> bool:
    """True unless the environment variable disables it, for the Python API too."""
    return os.environ.get("LOCALLLM_SELF_CHECK", "").lower() not in ("0", "false", "no", "off")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes, device and precision of the engine. None means: decided when the model is known.

    `kv_cache_tokens` is the size of the KV cache in tokens, rounded down to whole blocks.
    `kv_cache_dtype` is the dtype of cached keys and values; "auto" is the model's own dtype.
    `state_dtype` is that of the matrices of recurrences.
    `max_num_batched_tokens` is the token budget of one step; None: the device's default.
    `gpu_memory_utilization` is the fraction of free memory to use; at least `reserve_bytes` stay
    free.
    `deterministic` computes every row the same way, whatever else is in its step.
    `self_check` compares a GPU's kernels with torch's operators before their first use there.
    `expert_memory_bytes` is the GPU memory for experts, of which the others stay in host memory;
    None: all that is left.
    `snapshot_bytes` limits the host memory for states of recurrences, see snapshots.py.
    `cache_disk_bytes` limits the prefixes kept in `cache_dir` (None: in localllm's cache); 0: none.
    `pools`: requests can ask for `pooling`, for which every layer computes all rows.
    `threads` is the number of CPU threads; None: at most one per core, fewer while other processes
    use the cores. Either way the engine sets the number of torch's threads
    (`torch.set_num_threads`) for the whole process.
    """

    max_model_len: int | None = None
    block_size: int = 16
    kv_cache_tokens: int | None = None
    gpu_memory_utilization: float = 0.9
    reserve_bytes: int = 0
    expert_memory_bytes: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    enable_prefix_caching: bool = True
    snapshot_bytes: int = 2 << 30
    cache_disk_bytes: int = 0
    cache_dir: str | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    state_dtype: StateDType = "float32"
    backend: Literal["auto", "torch", "triton"] = "auto"
    deterministic: bool = False
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    threads: int | None = None
    pools: bool = False
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
            ("expert_memory_bytes", 0),
            ("snapshot_bytes", 0),
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
                f"kv_cache_tokens must hold at least one block of {self.block_size} tokens, "
                f"found {self.kv_cache_tokens}",
                param="kv_cache_tokens",
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise RequestError(
                f"gpu_memory_utilization must be greater than 0 and at most 1, "
                f"found {self.gpu_memory_utilization!r}",
                param="gpu_memory_utilization",
            )
        for name, known in (
            ("device", ("auto", "cuda", "cpu")),
            ("dtype", ("auto", *DTYPES)),
            ("kv_cache_dtype", KV_CACHE_DTYPES),
            ("state_dtype", STATE_DTYPES),
            ("backend", ("auto", "torch", "triton")),
        ):
            if getattr(self, name) not in known:
                raise RequestError(
                    f"{name} must be one of {', '.join(known)}, found {getattr(self, name)!r}",
                    param=name,
                )
