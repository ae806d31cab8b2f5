"""The inputs of a step on a GPU besides weights and cache: packed on the host, copied at once.

Every array of a step has its place in one buffer, which depends on the step's shape alone. So a
captured step of that shape always finds its inputs in the same place, and one copy gives it new
ones. In front of them is what the device itself keeps from step to step: the newest token of every
running request. A request whose newest id is not on the host yet reads it from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.engine.batching import state_slots
from localllm.engine.slots import Slots
from localllm.model.inputs import ForwardBatch, GroupTables
from localllm.schedule.rows import sampled_rows, within
from localllm.schedule.scheduler import ScheduledBatch
from localllm_kernels.recurrence.state_cache import StateTables
from localllm_kernels.sampling.sample import Drafts, SamplingRows

# Steps with up to this many tokens per request are captured too: drafts, and the ends of prompts.
MAX_WINDOW = 16
NOT_STORED = NOT_SAMPLED = NOT_DRAFTED = -1
_ALL = -1  # of tokens that see all before them


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes of a step: tokens, requests, the most tokens of a request, and sampled rows."""

    num_tokens: int
    num_seqs: int
    max_query_len: int
    num_logit_rows: int

    @property
    def samples_all(self) -> bool:
        """Whether there is a row of logits for every token."""
        return self.num_logit_rows == self.num_tokens


def buckets(max_num_seqs: int) -> list[int]:
    """The numbers of rows that steps are padded to; the last is at least `max_num_seqs` and
    MAX_WINDOW.
    """
    found = [1, 2, 4]
    while found[-1] < max(max_num_seqs, MAX_WINDOW):
        found.append(found[-1] + (4 if found[-1] < 8 else 8 if found[-1] < 64 else 32))
    return found


def graph_rows(max_num_seqs: int) -> int:
    """The most rows of all captured steps together: those of all buckets, and as many again for
    windows.
    """
    return 2 * sum(buckets(max_num_seqs))


def padded_shape(batch: ScheduledBatch, rows: list[int]) -> StepShape | None:
    """The shape that `batch` is padded to if its requests have few tokens; None if one has more.

    `rows`: the result of `buckets`.
    """
    counts = [entry.num_scheduled_tokens for entry in batch.requests]
    longest, total = max(counts), sum(counts)
    if longest > MAX_WINDOW or total > rows[-1]:
        return None
    num_seqs = next(size for size in rows if size >= len(counts))
    if longest == 1:
        return StepShape(num_seqs, num_seqs, 1, num_seqs)
    window = 1 << (longest - 1).bit_length()
    num_tokens = next(size for size in rows if size >= total)
    return StepShape(num_tokens, num_seqs, window, num_tokens)


def exact_shape(batch: ScheduledBatch) -> StepShape:
    """The shape of `batch` without padding."""
    counts = [entry.num_scheduled_tokens for entry in batch.requests]
    num_samples = sum(entry.num_samples for entry in batch.requests)
    return StepShape(sum(counts), len(counts), max(counts), num_samples)


# Triton compiles a kernel again for pointers with a different alignment.
ALIGNMENT = 16


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


# Name, dtype, and length for a shape; besides these, one slot mapping for each table.
_ARRAYS: tuple[tuple[str, str, Callable[[StepShape], int]], ...] = (
    ("ids", "int64", lambda shape: shape.num_tokens),
    ("sources", "int64", lambda shape: shape.num_tokens),
    ("positions", "int64", lambda shape: shape.num_tokens),
    ("seq_lens", "int64", lambda shape: shape.num_seqs),
    ("logit_rows", "int64", lambda shape: shape.num_logit_rows),
    ("keys", "int64", lambda shape: shape.num_logit_rows),
    ("cu_seqlens_q", "int32", lambda shape: shape.num_seqs + 1),
    ("slots", "int32", lambda shape: shape.num_logit_rows),
    ("top_k", "int32", lambda shape: shape.num_logit_rows),
    ("depths", "int32", lambda shape: shape.num_logit_rows),
    ("drafts", "int32", lambda shape: shape.num_logit_rows),
    ("temperatures", "float32", lambda shape: shape.num_logit_rows),
    ("top_p", "float32", lambda shape: shape.num_logit_rows),
    ("min_p", "float32", lambda shape: shape.num_logit_rows),
    ("factors", "float32", lambda shape: 3 * shape.num_logit_rows),
)
_TORCH_TYPES = {"int64": torch.int64, "int32": torch.int32, "float32": torch.float32}


# Of the requests and snapshots of recurrences, see StateTables.
_REQUEST_STATE, _SAVE = 8, 2


@dataclass(frozen=True, slots=True)
class StepTables:
    """What a model's steps need beside tokens: the indices of the requests' block tables that they
    read, and the most snapshots that they take, None for a model without recurrences.
    """

    numbers: tuple[int, ...]
    num_saves: int | None = None

    def __len__(self) -> int:
        return len(self.numbers)


def slots_name(table: int) -> str:
    """The name of the array with the cache slots of new tokens for one table."""
    return f"slot_mapping {table}"


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a shape's arrays are in the buffer, in bytes; block tables follow at `num_bytes`."""

    places: dict[str, tuple[int, int, str]]
    num_bytes: int

    @classmethod
    def of(cls, shape: StepShape, tables: StepTables) -> "Layout":
        """The layout, a function of shape, number of tables and most snapshots only."""
        places, offset = {}, 0
        lengths = [(name, kind, length(shape)) for name, kind, length in _ARRAYS]
        lengths += [(slots_name(i), "int64", shape.num_tokens) for i in range(len(tables))]
        if tables.num_saves is not None:
            lengths.append(("states", "int64", _REQUEST_STATE * shape.num_seqs))
            lengths.append(("saves", "int64", _SAVE * max(1, tables.num_saves)))
        for name, kind, length in lengths:
            end = offset + length * np.dtype(kind).itemsize
            places[name] = (offset, end, kind)
            offset = _aligned(end)
        return cls(places, offset)

    def on_host(self, buffer: npt.NDArray[np.uint8]) -> dict[str, npt.NDArray[np.generic]]:
        """The arrays as views of a host buffer."""
        return {name: buffer[a:b].view(kind) for name, (a, b, kind) in self.places.items()}

    def on_device(self, buffer: Tensor) -> dict[str, Tensor]:
        """The arrays as views of a device buffer, uint8."""
        return {
            name: buffer[a:b].view(_TORCH_TYPES[kind]) for name, (a, b, kind) in self.places.items()
        }


@dataclass(frozen=True, slots=True)
class Filled:
    """A step's inputs in a host buffer: its bytes, the sizes of the block tables, the rows of
    logits that are sampled for caught-up requests, in order, the slot of each row, and whether
    there are drafts.
    """

    num_bytes: int
    table_shape: tuple[int, int, int]
    rows: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int32]
    has_drafts: bool


def fill(
    host: npt.NDArray[np.uint8],
    batch: ScheduledBatch,
    shape: StepShape,
    slots: Slots,
    block_size: int,
    tables: StepTables,
) -> Filled:
    """Write the inputs of `batch`, padded to `shape`, into a host buffer."""
    layout = Layout.of(shape, tables)
    arrays = layout.on_host(host)
    fill_nothing(host, shape, tables)
    entries = batch.requests
    counts = np.array([entry.num_scheduled_tokens for entry in entries])
    skipped = np.array([entry.num_skipped * block_size for entry in entries])
    starts = np.array([entry.start for entry in entries]) - skipped
    ends = np.cumsum(counts)
    num_tokens = int(ends[-1])
    places = np.repeat(starts, counts) + within(counts)
    width = max(len(entry.request.tables[number]) for entry in entries for number in tables.numbers)
    table_shape = (len(tables), len(entries), width)
    tables_end = layout.num_bytes + prod(table_shape) * 4
    packed = host[layout.num_bytes : tables_end].view(np.int32).reshape(table_shape)
    sources = arrays["sources"]
    sources[:num_tokens] = np.arange(num_tokens) + _aligned(8 * slots.count) // 8
    for i, (entry, end) in enumerate(zip(entries, ends.tolist(), strict=True)):
        known = entry.token_ids
        for place, number in enumerate(tables.numbers):
            table = entry.request.tables[number][entry.num_skipped :]
            packed[place, i, : len(table)] = np.frombuffer(table, dtype=np.int32)
        row = end - entry.num_scheduled_tokens
        if known:
            arrays["ids"][row : row + len(known)] = known
        if row + len(known) < end:  # the newest is on the device
            sources[end - 1] = entry.request.slot
    # Where they stand in the cache, and, where they have no entries there, behind what they see.
    seen = np.array([_ALL if each.num_seen is None else each.num_seen for each in entries])
    behind = np.repeat(seen, counts)
    arrays["positions"][:num_tokens] = np.where(behind == _ALL, places, behind)
    requests = np.repeat(np.arange(len(entries)), counts)
    for place in range(len(tables)):
        blocks = packed[place, requests, places // block_size].astype(np.int64)
        arrays[slots_name(place)][:num_tokens] = blocks * block_size + places % block_size
    arrays["cu_seqlens_q"][1 : len(entries) + 1] = ends
    arrays["cu_seqlens_q"][len(entries) + 1 :] = num_tokens
    arrays["seq_lens"][: len(entries)] = np.where(seen == _ALL, starts + counts, seen)
    if tables.num_saves is not None:
        _fill_states(arrays, batch, num_tokens)
    sampled = sampled_rows(entries, ends)
    rows = sampled if shape.samples_all else np.arange(len(sampled))
    arrays["logit_rows"][rows] = sampled
    num_samples = np.array([entry.num_samples for entry in entries])
    own_slots = np.repeat([entry.request.slot for entry in entries], num_samples)
    depths = within(num_samples)
    known_ends = np.repeat([entry.known_end for entry in entries], num_samples)
    slots.fill(arrays, rows, own_slots, (known_ends + depths).astype(np.uint64))
    arrays["depths"][rows] = depths
    drafts = [(*entry.draft, NOT_DRAFTED) for entry in entries if entry.catches_up]
    arrays["drafts"][rows] = np.fromiter(chain.from_iterable(drafts), np.int32, len(rows))
    has_drafts = any(entry.draft for entry in entries)
    return Filled(tables_end, table_shape, rows, arrays["slots"].view(np.int32), has_drafts)


def _fill_states(
    arrays: dict[str, npt.NDArray[np.generic]], batch: ScheduledBatch, num_tokens: int
) -> None:
    requests, saves = state_slots(batch).rows_of_tables()
    states = arrays["states"].reshape(-1, _REQUEST_STATE)
    states[: len(requests)] = requests
    states[len(requests) :, 1] = num_tokens  # where requests without rows begin
    arrays["saves"].reshape(-1, _SAVE)[: len(saves)] = saves


def fill_nothing(host: npt.NDArray[np.uint8], shape: StepShape, tables: StepTables) -> int:
    """Write inputs of padding only, which is neither stored nor sampled; returns their bytes."""
    layout = Layout.of(shape, tables)
    arrays = layout.on_host(host)
    host[: layout.num_bytes] = 0
    for table in range(len(tables)):
        arrays[slots_name(table)].fill(NOT_STORED)
    arrays["slots"].fill(NOT_SAMPLED)
    arrays["drafts"].fill(NOT_DRAFTED)
    return layout.num_bytes


class DeviceInputs:
    """The input buffer on the device, with the newest tokens in front, and the block tables."""

    def __init__(
        self,
        num_slots: int,
        most_tokens: int,
        most_rows: int,
        max_blocks: int,
        device: torch.device,
        tables: Sequence[int],
        num_saves: int | None = None,
        hidden: tuple[int, torch.dtype] | None = None,
    ) -> None:
        """`most_rows`: the most requests in a padded step; `max_blocks`: blocks of the longest
        request; `tables`: see `build_forward_batch`; `num_saves`: see StepTables; `hidden`: width
        and dtype of a head's hidden states.
        """
        largest = StepShape(most_tokens, most_rows, 1, most_tokens)
        self.tables = StepTables(tuple(dict.fromkeys(tables)), num_saves)
        # For each group of the cache, the index of its table among those.
        self._places = [self.tables.numbers.index(table) for table in tables]
        tables_bytes = 4 * len(self.tables) * num_slots * max_blocks
        self.num_bytes = Layout.of(largest, self.tables).num_bytes + tables_bytes
        kept = _aligned(8 * num_slots)
        whole = torch.zeros((kept + self.num_bytes + 7) // 8 * 8, dtype=torch.uint8, device=device)
        self._all_ids = whole.view(torch.int64)
        self.newest = self._all_ids[:num_slots]
        self._buffer = whole[kept:]
        sizes = (len(self.tables), most_rows, max_blocks)
        self._tables = torch.zeros(sizes, dtype=torch.int32, device=device)
        # [most_tokens, hidden], what a head reads besides tokens.
        self.hidden: Tensor | None = None
        if hidden is not None:
            width, dtype = hidden
            self.hidden = torch.zeros(most_tokens, width, dtype=dtype, device=device)

    def place(self, num_bytes: int) -> Tensor:
        """The device buffer for `num_bytes` of a filled host buffer."""
        return self._buffer[:num_bytes]

    def spread_tables(self, shape: StepShape, table_shape: tuple[int, int, int]) -> None:
        """Copy the packed block tables into their rows."""
        _, rows, width = table_shape
        start = Layout.of(shape, self.tables).num_bytes
        packed = self._buffer[start : start + 4 * prod(table_shape)].view(torch.int32)
        self._tables[:, :rows, :width].copy_(packed.view(table_shape))

    def forward_batch(self, shape: StepShape) -> ForwardBatch:
        """The inputs of the model; if the step is captured, call this within the capture."""
        arrays = Layout.of(shape, self.tables).on_device(self._buffer)
        states = None
        if self.tables.num_saves is not None:
            states = StateTables(
                arrays["states"].view(-1, _REQUEST_STATE),
                arrays["saves"].view(-1, _SAVE),
                shape.max_query_len,
            )
        return ForwardBatch(
            input_ids=self._all_ids.index_select(0, arrays["sources"]),
            positions=arrays["positions"],
            tables=tuple(
                GroupTables(arrays[slots_name(i)], self._tables[i, : shape.num_seqs])
                for i in self._places
            ),
            cu_seqlens_q=arrays["cu_seqlens_q"],
            seq_lens=arrays["seq_lens"],
            max_query_len=shape.max_query_len,
            logit_rows=arrays["logit_rows"],
            num_logit_rows=shape.num_logit_rows,
            states=states,
            hidden=None if self.hidden is None else self.hidden[: shape.num_tokens],
        )

    def sampling_rows(
        self, shape: StepShape, *, has_drafts: bool = False
    ) -> tuple[SamplingRows, Tensor]:
        """The sampling parameters of the rows, and their penalty factors, float32 [rows, 3]."""
        arrays = Layout.of(shape, self.tables).on_device(self._buffer)
        rows = SamplingRows(
            arrays["slots"],
            self.newest,
            arrays["temperatures"],
            arrays["top_k"],
            arrays["top_p"],
            arrays["min_p"],
            arrays["keys"],
            drafts=Drafts(arrays["depths"], arrays["drafts"]) if has_drafts else None,
        )
        return rows, arrays["factors"].view(-1, 3)
