"""The scheduler of a loaded decoder, its prefix cache, and the part of that on disk."""

import hashlib

from localllm.engine.config import EngineConfig
from localllm.engine.loaded_decoder import LoadedDecoder
from localllm.engine.memory import slot_sizes
from localllm.engine.prefix_disk import PrefixDisk
from localllm.model.paged_kv_cache import PagedKVCache
from localllm.schedule.block_group import BlockGroup
from localllm.schedule.block_pool import BlockPool
from localllm.schedule.scheduler import Scheduler, SchedulerConfig
from localllm.schedule.snapshots import Snapshots
from localllm.user.places import prefix_folder
from localllm.user.version import __version__


def scheduler_config(
    loaded: LoadedDecoder, config: EngineConfig, weights_id: str
) -> SchedulerConfig:
    """The limits of steps, and the root of the keys of blocks; `weights_id`: see `build_engine`."""
    model, architecture = loaded.model, loaded.model.architecture
    # Everything besides the tokens that the bits of keys and values depend on.
    parts = (
        weights_id,
        loaded.dtype,
        f"{loaded.kv_dtype}, keys less their means",
        architecture.own_keys,
        config.block_size,
        *architecture.ropes,
        *(group.state for group in architecture.recurrent_groups),
        # Of the tables' length, which a plan that was made smaller afterwards does not have.
        *(rope.pair_factors(model.ropes.num_positions) for rope in architecture.ropes),
        loaded.device.type,
        model.ops.traits.name,
        model.ops.choice,
        model.ops.build,
        config.deterministic,
        *(coding.digest for coding in loaded.codings),
        __version__,
    )
    return SchedulerConfig(
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=loaded.plan.max_num_batched_tokens,
        enable_prefix_caching=config.enable_prefix_caching,
        cache_root=hashlib.sha256(" ".join(map(str, parts)).encode()).digest(),
    )


def make_scheduler(
    loaded: LoadedDecoder,
    config: EngineConfig,
    scheduling: SchedulerConfig,
    kv_cache: PagedKVCache,
) -> tuple[Scheduler, PrefixDisk | None]:
    """The scheduler over the blocks of `kv_cache`, and where prefixes are kept on disk."""
    groups = [
        BlockGroup(BlockPool(group.num_blocks), config.block_size, group.window, group.is_aligned)
        for group in loaded.plan.groups
    ]
    # The slots that the plan has beyond those of requests.
    per_step = slot_sizes(loaded.model.architecture, config).num_slots - config.max_num_seqs
    snapshots = Snapshots(config.snapshot_bytes, per_step) if per_step else None
    disk = None
    if config.cache_disk_bytes and config.enable_prefix_caching:
        folder = prefix_folder(config.cache_dir)
        pools = [group.pool for group in groups[: len(kv_cache.stacks)]]
        disk = PrefixDisk(folder, config.cache_disk_bytes, kv_cache, pools, snapshots)
    return Scheduler(scheduling, groups, disk, snapshots), disk
