"""Which rows and slots of a batch are whose, as arrays."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from localllm.schedule.scheduler import ScheduledRequest


def sampled_rows(
    scheduled: Sequence[ScheduledRequest], ends: npt.NDArray[np.integer]
) -> npt.NDArray[np.int64]:
    """The rows of a batch whose next tokens are sampled, in order.

    `ends`: for each request, one past its last row.
    """
    counts = np.array([entry.num_samples for entry in scheduled], dtype=np.int64)
    firsts: npt.NDArray[np.int64] = ends.astype(np.int64) - counts
    rows: npt.NDArray[np.int64] = np.repeat(firsts, counts) + within(counts)
    return rows


def within(counts: npt.NDArray[np.integer]) -> npt.NDArray[np.int64]:
    """The index of each item within its group, for groups of `counts` items: 0, 1, 2, 0, 1, …"""
    firsts = np.cumsum(counts) - counts
    places: npt.NDArray[np.int64] = np.arange(counts.sum()) - np.repeat(firsts, counts)
    return places


def slots_of(
    positions: npt.NDArray[np.int64], table: npt.NDArray[np.int32], block_size: int
) -> npt.NDArray[np.int64]:
    """The cache slots of a request's `positions`, looked up in its block table."""
    return table[positions // block_size].astype(np.int64) * block_size + positions % block_size
