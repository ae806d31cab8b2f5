"""Masks the tokens that grammars forbid in a step's logits on the device, before sampling."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from localllm.errors import RequestError
from localllm.schedule.scheduler import ScheduledRequest

WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """The masks of a step, for `rows` of its sampled rows: `bits`, int32 [len(rows), vocab / 32].

    `errors`: of requests whose grammar failed, by their index in the step.
    """

    rows: list[int]
    bits: npt.NDArray[np.int32]
    errors: dict[int, RequestError]


def find_masks(scheduled: Sequence[ScheduledRequest], vocab_size: int) -> TokenMasks | None:
    """The masks of a step's sampled rows; None if no request has a grammar."""
    rows: list[int] = []
    places: list[tuple[int, int]] = []
    first = 0
    for place, entry in enumerate(scheduled):
        if entry.request.matcher is not None and entry.num_samples:
            places.append((place, len(rows)))
            rows += range(first, first + entry.num_samples)
        first += entry.num_samples
    if not rows:
        return None
    bits = np.zeros((len(rows), -(-vocab_size // WORD_BITS)), dtype=np.int32)
    errors = {}
    for place, start in places:
        entry = scheduled[place]
        matcher = entry.request.matcher
        assert matcher is not None
        own = bits[start : start + entry.num_samples]
        matcher.fill(entry.draft, own)
        error = matcher.error
        if error is not None:
            errors[place] = error
            own.fill(-1)
    return TokenMasks(rows, bits, errors)


def forbid(logits: Tensor, rows: Sequence[int], bits: npt.NDArray[np.int32]) -> None:
    """Set `rows` of logits [rows, vocab] to -inf, in place, where `bits` are 0."""
    where = torch.tensor(rows).to(logits.device, non_blocking=True)
    words = torch.from_numpy(bits).to(logits.device, non_blocking=True)
    places = torch.arange(WORD_BITS, dtype=torch.int32, device=logits.device)
    forbidden = ((words[:, :, None] >> places) & 1 == 0).flatten(1)[:, : logits.shape[1]]
    logits[where] = logits[where].masked_fill(forbidden, float("-inf"))
