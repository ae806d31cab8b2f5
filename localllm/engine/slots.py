"""Sampling parameters of running requests by slot: everything that stays the same between steps.

A request has a slot from its admission on; its parameters are written once, at that time.
"""

from collections import Counter

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.engine.sampler import MIN_TEMPERATURE, has_penalties
from localllm.schedule.request import Request
from localllm.schedule.sampling_params import SamplingParams
from localllm.schedule.scheduler import ScheduledBatch
from localllm_kernels.sampling.sample import Biases, Penalties

_Array = npt.NDArray[np.generic]


class Slots:
    """Sampling parameters of each slot, and the token counts for penalties, on the device."""

    def __init__(self, count: int, vocab_size: int, device: torch.device) -> None:
        self.count = count
        self._vocab_size, self._device = vocab_size, device
        self._admissions = np.zeros(count, np.int64)
        self._seeds = np.zeros(count, np.uint64)
        self._columns = {
            "temperatures": np.zeros(count, np.float32),
            "top_k": np.zeros(count, np.int32),
            "top_p": np.ones(count, np.float32),
            "min_p": np.zeros(count, np.float32),
        }
        self._factors = np.ones((count, 3), np.float32)
        self._biases: dict[int, tuple[list[int], list[float]]] = {}
        # Allocated when a request first has penalties.
        self._counts: Tensor | None = None

    def admit(self, batch: ScheduledBatch) -> None:
        """Write the parameters of requests that were admitted since the last call."""
        for entry in batch.requests:
            request = entry.request
            if self._admissions[request.slot] != request.admission:
                self._write(request)
                self._admissions[request.slot] = request.admission

    def forget(self) -> None:
        """Make `admit` write everything again from known ids, after a step that failed at an
        unknown point.
        """
        self._admissions.fill(0)

    def fill(
        self,
        arrays: dict[str, _Array],
        rows: npt.NDArray[np.int64],
        slots: npt.NDArray[np.int64],
        positions: npt.NDArray[np.uint64],
    ) -> None:
        """Write the sampling parameters of the requests in `slots`, for their tokens at
        `positions`, into `rows` of a step's arrays.
        """
        arrays["slots"][rows] = slots
        for name, column in self._columns.items():
            arrays[name][rows] = column[slots]
        arrays["factors"].reshape(-1, 3)[rows] = self._factors[slots]
        arrays["keys"].view(np.uint64)[rows] = noise_keys(self._seeds[slots], positions)

    def penalties(self, batch: ScheduledBatch, factors: Tensor) -> Penalties | None:
        """The counts and a step's penalty factors; None if none of its requests has penalties."""
        if self._counts is None or not any(
            has_penalties(entry.request.params) for entry in batch.requests
        ):
            return None
        return Penalties(self._counts, factors)

    def biases(self, slots: npt.NDArray[np.int32]) -> Biases | None:
        """The biases of a step's rows; None if no row has any. `slots`: [rows], -1 for no slot."""
        if not self._biases or not any(slot in self._biases for slot in slots.tolist()):
            return None
        starts, tokens, values = [0], list[int](), list[float]()
        for slot in slots.tolist():
            own_tokens, own_values = self._biases.get(slot, ([], []))
            tokens += own_tokens
            values += own_values
            starts.append(len(tokens))
        return Biases(
            torch.tensor(starts, dtype=torch.int32).to(self._device, non_blocking=True),
            torch.tensor(tokens, dtype=torch.int32).to(self._device, non_blocking=True),
            torch.tensor(values).to(self._device, non_blocking=True),
        )

    def no_penalties(self, factors: Tensor) -> Penalties:
        """Empty penalties, for rows that are not sampled."""
        counts = torch.zeros((1, self._vocab_size), dtype=torch.int32, device=self._device)
        return Penalties(counts, factors)

    def no_biases(self, num_rows: int) -> Biases:
        """Empty biases for `num_rows` rows that are not sampled."""
        starts = torch.zeros(num_rows + 1, dtype=torch.int32, device=self._device)
        return Biases(
            starts, torch.zeros_like(starts), torch.zeros_like(starts, dtype=torch.float32)
        )

    def _write(self, request: Request) -> None:
        params, slot = request.params, request.slot
        greedy = params.temperature < MIN_TEMPERATURE
        self._columns["temperatures"][slot] = 0.0 if greedy else params.temperature
        self._columns["top_k"][slot] = params.top_k
        self._columns["top_p"][slot] = params.top_p
        self._columns["min_p"][slot] = params.min_p
        self._seeds[slot] = request.seed
        self._factors[slot] = _factors(params)
        self._biases.pop(slot, None)
        if params.logit_bias:
            self._biases[slot] = (list(params.logit_bias), list(params.logit_bias.values()))
        if has_penalties(params):
            self._count(request)

    def _count(self, request: Request) -> None:
        """Write the counts of a request's tokens, in the format of `Penalties`."""
        if self._counts is None:
            shape = (self.count, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._device)
        start = request.num_prompt_tokens
        times = Counter(request.token_ids[start:])
        found = dict.fromkeys(request.token_ids[:start], 1)
        found |= {token: 2 * count + found.get(token, 0) for token, count in times.items()}
        tokens = torch.tensor(list(found)).to(self._device, non_blocking=True)
        values = torch.tensor(list(found.values()), dtype=torch.int32)
        row = self._counts[request.slot]
        row.zero_()
        row.index_copy_(0, tokens, values.to(self._device, non_blocking=True))


def noise_keys(
    seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    """`noise_key` of the sampler, for many tokens at once."""
    return _mix64(seeds ^ _mix64(positions))


def _mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def _factors(params: SamplingParams) -> tuple[float, float, float]:
    return params.repetition_penalty, params.presence_penalty, params.frequency_penalty
