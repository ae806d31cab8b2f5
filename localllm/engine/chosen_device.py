"""The device, its memory, and the dtypes and steps that a configuration asks for there."""

import os
from dataclasses import replace

import torch

from localllm.engine.config import EngineConfig
from localllm.engine.host_memory import available_bytes
from localllm.errors import BackendError
from localllm.model.architecture import Architecture
from localllm_kernels.attention.four_bits import FOUR_BITS, OWN_KEYS

# Tokens in one step. On a CPU, matrix products reach the same speed with 64 rows as with 2,048 (see
# docs/performance.md), and every request waits for the whole step for its next token.
_STEP_TOKENS = {"cpu": 256, "cuda": 2048}
KV_DTYPES = {
    "bf16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": FOUR_BITS,
}


def select_device(config: EngineConfig) -> torch.device:
    """The device that `config` asks for. Raises: BackendError if it asks for a missing GPU."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise BackendError(
            "no usable GPU: torch sees no CUDA device",
            where=f"torch {torch.__version__}",
            hint="a driver and a torch build with CUDA, or --device cpu where a command takes it",
        )
    wants_cuda = config.device == "cuda" or (config.device == "auto" and has_cuda)
    return torch.device("cuda" if wants_cuda else "cpu")


def dtypes_of(architecture: Architecture, config: EngineConfig) -> tuple[torch.dtype, torch.dtype]:
    """The dtype of computation, and that of cached keys and values."""
    name = architecture.dtype if config.dtype == "auto" else config.dtype
    dtype: torch.dtype = getattr(torch, name)
    return dtype, KV_DTYPES.get(config.kv_cache_dtype, dtype)


def as_cached(architecture: Architecture, kv_dtype: torch.dtype) -> Architecture:
    """The same, with what a cache of this dtype keeps besides."""
    return replace(architecture, own_keys=OWN_KEYS if kv_dtype == FOUR_BITS else 0)


def step_tokens(device: str) -> int:
    """The default number of tokens in one step on `cpu` or `cuda`."""
    return _STEP_TOKENS[device]


def total_bytes(device: torch.device) -> int:
    """Total bytes of a device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def free_bytes(device: torch.device) -> int:
    """Bytes of a device's memory that a program could allocate now."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # return freed memory that torch still holds
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes()
