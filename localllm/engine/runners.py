"""The caches and the runners of loaded decoders."""

from collections.abc import Iterator, Sequence

from localllm.engine.chosen_operators import tuning_file
from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import LoadedDecoder
from localllm.engine.memory import slot_sizes
from localllm.engine.model_runner import ModelRunner
from localllm.engine.thread_count import ThreadCount
from localllm.model.key_means import key_means
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.runner import HeadRunner
from localllm.schedule.scheduler import SchedulerConfig


def allocate(
    loaded: LoadedDecoder, config: EngineConfig, num_blocks: Sequence[int]
) -> PagedKVCache:
    """The cache of a decoder, with `num_blocks` blocks in each of its groups."""
    return PagedKVCache.allocate(
        loaded.model.architecture,
        num_blocks,
        config.block_size,
        loaded.kv_dtype,
        loaded.device,
        slot_sizes(loaded.model.architecture, config),
        turns_keys=loaded.model.ops.traits.turns_keys,
        codings=loaded.codings,
        key_means=key_means(loaded.model, loaded.kv_dtype),
        uncoded_dtype=loaded.dtype,
    )


def make_runner(
    loaded: LoadedDecoder,
    kv_cache: PagedKVCache,
    scheduling: SchedulerConfig,
    longest: int,
    threads: ThreadCount | None = None,
    tables: Sequence[int] | None = None,
    taps: Sequence[int] = (),
) -> HeadRunner:
    """The runner of a decoder on its device; `longest`: the most tokens of a request; `threads`,
    `tables`, `taps`: see ModelRunner.
    """
    if not loaded.model.ops.traits.captures or loaded.device.type != "cuda":
        own_threads = threads if loaded.device.type == "cpu" else None
        return ModelRunner(loaded.model, kv_cache, own_threads, tables, taps)
    # What follows imports the kernels, which a CPU does not need.
    from localllm.engine.device_runner import DeviceRunner
    from localllm.operators.device import Device
    from localllm.operators.tuning import tune

    device = Device()
    tuning: Iterator[None] | None = None
    if loaded.tunings is not None:
        tuning = tune(loaded.model, loaded.tunings, device, tuning_file(loaded.device).add)
    return DeviceRunner(loaded.model, kv_cache, device, scheduling, longest, tuning, tables, taps)
