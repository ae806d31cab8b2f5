"""The paged KV cache of a model, and what its recurrences keep."""

import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor

from localllm.model.architecture import Architecture, SlotSizes
from localllm.model.inputs import GroupTables
from localllm_kernels.attention.four_bits import FOUR_BITS, KeyCoding
from localllm_kernels.attention.kv_cache import CODE_LIMITS, KVCache, is_turnable
from localllm_kernels.recurrence.state_cache import StateCache

# So much is written at once where it is allocated, so that no step waits for memory: a new block
# has dozens of pages, and the first write of each takes up to 0.15 ms in a virtual machine.
_SMALL_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class PagedKVCache:
    """The caches of all layers.

    `stacks` has one entry per group; its tensors have the group's layers as their first dimension.
    `places`: each layer's group and its place in it, see `Architecture.cache_places`. `recurrent`:
    for each layer that is a recurrence, by index, what it keeps of every slot. `uncoded`: of each
    group, that for its uncoded rows, if there is one.
    """

    stacks: tuple[KVCache, ...]
    places: tuple[tuple[int, int] | None, ...]
    recurrent: Mapping[int, StateCache] = field(default_factory=dict)
    uncoded: Mapping[int, int] = field(default_factory=dict)

    def layer(self, index: int) -> KVCache | None:
        """The cache of one layer, None if it has none."""
        place = self.places[index]
        return None if place is None else self.stacks[place[0]].layer(place[1])

    def tables(self, layer: int, of_groups: Sequence[GroupTables]) -> GroupTables | None:
        """The tables of one layer, None if it has none, of those of all groups."""
        place = self.places[layer]
        if place is None:
            return None
        uncoded = self.uncoded.get(place[0])
        own = of_groups[place[0]]
        return own if uncoded is None else replace(own, uncoded=of_groups[uncoded])

    def num_blocks(self, group: int) -> int:
        """Blocks of a group, including the null block."""
        return self.stacks[group].key.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per block, the same in all groups."""
        return self.stacks[0].key.shape[3]

    @classmethod
    def allocate(
        cls,
        architecture: Architecture,
        num_blocks: Sequence[int],
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        slots: SlotSizes | None = None,
        *,
        turns_keys: bool = False,
        codings: Sequence[KeyCoding] = (),
        key_means: Sequence[Tensor | None] = (),
        uncoded_dtype: torch.dtype = torch.bfloat16,
    ) -> "PagedKVCache":
        """Zeroed caches; `num_blocks`: of each cache group; `slots`: those of recurrences;
        `turns_keys`: see Traits; `codings`: of each group's keys in 4 bits, `key_means`: of those
        in 8 bits, see key_means.py, both with a first dimension of layers; `uncoded_dtype`: of
        groups for uncoded rows.
        """
        groups = architecture.cache_groups
        stacks = [
            empty_cache(
                (len(group.layers), count, group.state.num_heads, block_size, group.state.width),
                dtype if group.coded is None else uncoded_dtype,
                device,
                values_are_keys=group.state.values_are_keys,
                turns_keys=turns_keys,
                coding=codings[i] if codings and group.coded is None else None,
                key_means=key_means[i] if key_means and group.coded is None else None,
            )
            for i, (group, count) in enumerate(zip(groups, num_blocks, strict=True))
        ]
        uncoded = {group.coded: i for i, group in enumerate(groups) if group.coded is not None}
        for coded, own in uncoded.items():
            stacks[coded] = replace(stacks[coded], uncoded=stacks[own])
        recurrent = {} if slots is None else _recurrent_caches(architecture, slots, device)
        return cls(tuple(stacks), architecture.cache_places, recurrent, uncoded)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """Copy a whole block in all layers of a group."""
        for part in _parts(self.stacks[group]):
            part[:, target] = part[:, source]

    def copy_blocks(self, tables: Sequence[int], copies: Iterable[tuple[int, int, int]]) -> None:
        """Make copies, in order, of blocks of a table in every group that uses it: (table, source,
        target). `tables`: the table that each group uses.
        """
        for copied, source, target in copies:
            for group, table in enumerate(tables):
                if table == copied:
                    self.copy_block(group, source, target)

    def block_bytes(self, group: int) -> int:
        """Bytes of one block, over all layers of a group."""
        return sum(part[:, 0].nbytes for part in _parts(self.stacks[group]))

    def read_block(self, group: int, block_id: int) -> Tensor:
        """The contents of a block in all layers of its group, uint8 [block_bytes], on the host."""
        own = self.stacks[group]
        parts = [part[:, block_id].contiguous().view(torch.uint8) for part in _parts(own)]
        return torch.cat([part.flatten() for part in parts]).cpu()

    @property
    def num_slots(self) -> int:
        """Slots of recurrences, 0 if there are none."""
        return next((len(each.rows) for each in self.recurrent.values()), 0)

    @property
    def state_bytes(self) -> int:
        """Bytes of the result of `read_state`, where as many tokens lie before as are needed."""
        matrices = (each.matrix[0] for each in self.recurrent.values() if each.matrix is not None)
        rows = sum(4 * each.num_rows * each.rows.shape[-1] for each in self.recurrent.values())
        return rows + sum(matrix.nbytes for matrix in matrices)

    def read_state(self, slot: int, position: int) -> Tensor:
        """What recurrences keep in a slot of the tokens before `position`, uint8, on the host."""
        caches = self.recurrent.values()
        num_bytes = sum(each.num_bytes(position) for each in caches)
        found = torch.empty(num_bytes, dtype=torch.uint8)
        start = 0
        for each in caches:
            start += each.read(slot, position, found[start:])
        return found

    def gather_state(self, slot: int, position: int) -> Tensor:
        """The same, on the device of the cache."""
        caches = self.recurrent.values()
        parts = [part for each in caches for part in each.parts(slot, position)]
        return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in parts])

    def write_state(self, slot: int, position: int, values: Tensor) -> None:
        """Fill a slot with the result of `read_state` or `gather_state`."""
        start = 0
        for each in self.recurrent.values():
            start += each.write(slot, position, values[start:])

    def write_block(self, group: int, block_id: int, values: Tensor) -> None:
        """Fill a block with the result of `read_block`."""
        start = 0
        for part in _parts(self.stacks[group]):
            block = part[:, block_id]
            own = values[start : start + block.nbytes]
            # A view as another dtype needs an aligned start, which the clone has.
            block.copy_(own.clone().view(part.dtype).view(block.shape))
            start += block.nbytes


def empty_cache(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    values_are_keys: bool = False,
    turns_keys: bool = False,
    coding: KeyCoding | None = None,
    key_means: Tensor | None = None,
) -> KVCache:
    """Zeroed keys and values, with scales if they are codes; `coding`: of those in 4
    bits; `key_means`: see KVCache.

    `shape`: (layers,) blocks, key/value heads, block size, head width; `values_are_keys`: both are
    the same tensors, which are never turned.
    """
    count = 1 if values_are_keys else 2
    *outer, width = shape
    stored_shape = (*outer, width // 2) if dtype == FOUR_BITS else shape
    stored = [_zeros(stored_shape, dtype, device) for _ in range(count)]
    is_turned = turns_keys and not values_are_keys and is_turnable(shape[-2], shape[-1], dtype)
    if dtype not in CODE_LIMITS and dtype != FOUR_BITS:
        return KVCache(stored[0], stored[-1], is_turned=is_turned)
    of_scales = torch.bfloat16 if dtype == FOUR_BITS else torch.float32
    scales = [_zeros(shape[:-1], of_scales, device) for _ in range(count)]
    return KVCache(stored[0], stored[-1], scales[0], scales[-1], is_turned, coding, key_means)


def _recurrent_caches(
    architecture: Architecture, slots: SlotSizes, device: torch.device
) -> dict[int, StateCache]:
    found: dict[int, StateCache] = {}
    for group in architecture.recurrent_groups:
        ring = group.state.num_rows + slots.max_draft
        shape = (len(group.layers), slots.num_slots, ring, group.state.width)
        rows, matrix = _zeros(shape, torch.float32, device), None
        if group.state.matrix is not None:
            dtype: torch.dtype = getattr(torch, group.state.dtype)
            matrix = _zeros((*shape[:2], *group.state.matrix), dtype, device)
        stack = StateCache(rows, group.state.num_rows, matrix)
        found |= {layer: stack.layer(place) for place, layer in enumerate(group.layers)}
    return found


def _parts(cache: KVCache) -> list[Tensor]:
    """The tensors of a stack of layers, each once."""
    parts = [cache.key, cache.value, cache.key_scales, cache.value_scales]
    if cache.value is cache.key:
        parts = [cache.key, cache.key_scales]
    return [part for part in parts if part is not None]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes <= _SMALL_BYTES:
        return torch.zeros(shape, dtype=dtype, device=device)
    # Zeroed pages, which the system provides only when they are first written: torch.zeros would
    # write gigabytes that may never be used, and numpy asks for large pages, with which a few
    # tokens take megabytes in each layer.
    options = {} if os.name == "nt" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
    pages = mmap.mmap(-1, num_bytes, **options)
    return torch.frombuffer(pages, dtype=torch.uint8).view(dtype).view(shape)
