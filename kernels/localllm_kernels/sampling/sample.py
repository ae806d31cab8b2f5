"""The next token of each request of a batch, on the device: penalties, filters, a keyed draw.

The token depends on the row and its key, never on the batch.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from localllm_kernels.sampling.gumbel_argmax import gumbel_argmax_reference


@dataclass(frozen=True, slots=True)
class Penalties:
    """`counts`: int32 [slots, vocab], for each request twice the number of times it generated a
    token, plus one if its prompt has the token; `factors`: float32 [rows, 3], repetition, presence
    and frequency, which are 1, 0 and 0 for none.
    """

    counts: Tensor
    factors: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """Row i has the entries `starts[i]` to `starts[i + 1]`, each token at most once."""

    starts: Tensor  # int32 [rows + 1]
    tokens: Tensor  # int32 [count]
    values: Tensor  # float32 [count]


@dataclass(frozen=True, slots=True)
class Drafts:
    """The tokens drafted for the positions of the rows; a request's rows are together, in order.

    `tokens`: the draft's token for each row, -1 after the end of a draft; `depths`: how many tokens
    are drafted before a row's, 0 in the first row of each request.
    """

    depths: Tensor  # int32 [rows]
    tokens: Tensor  # int32 [rows]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is sampled; all are [rows] except `newest`.

    `slots`: the slot of the row's request in `newest`, int64 [slots], which receives its token, and
    in the table of counts; -1 for a row that is not sampled. A temperature of 0 is greedy; `top_k`
    0, `top_p` 1 and `min_p` 0 switch those filters off; `keys`: the noise's keys, 64 bits each.
    """

    slots: Tensor  # int32
    newest: Tensor
    temperatures: Tensor  # float32
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    keys: Tensor  # int64
    penalties: Penalties | None = None
    biases: Biases | None = None
    drafts: Drafts | None = None


def sample_reference(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The same with torch's operators, a row at a time; `logits` are not changed."""
    ids = []
    for row, slot in enumerate(rows.slots.tolist()):
        if slot < 0:
            ids.append(-1)
            continue
        ids.append(_draw_reference(_adjusted(logits[row], rows, row, slot), rows, row))
    drafted = [-1] * len(ids) if rows.drafts is None else rows.drafts.tokens.tolist()
    is_booked = True
    for row, (slot, token) in enumerate(zip(rows.slots.tolist(), ids, strict=True)):
        if rows.drafts is None or rows.drafts.depths[row] == 0:
            is_booked = slot >= 0
        if is_booked:
            rows.newest[slot] = max(token, 0)
            if rows.penalties is not None:
                rows.penalties.counts[slot, max(token, 0)] += 2
        # Tokens after the first one that differs from the draft are not recorded.
        is_booked = is_booked and token >= 0 and token == drafted[row]
    return torch.tensor(ids, dtype=torch.int64, device=logits.device)


def _draw_reference(values: Tensor, rows: SamplingRows, row: int) -> int:
    temperature = float(rows.temperatures[row])
    if not values.max().isfinite():
        return -1
    if temperature == 0:
        return int(values.argmax())
    values = values / temperature
    is_kept = torch.ones_like(values, dtype=torch.bool)
    if 0 < rows.top_k[row] < len(values):
        is_kept = values >= values.topk(int(rows.top_k[row])).values[-1]
    if rows.top_p[row] < 1:
        chances = torch.softmax(values.double().masked_fill(~is_kept, -torch.inf), dim=0)
        likeliest = chances.sort(descending=True).values
        last = (likeliest.cumsum(dim=0) >= rows.top_p[row]).nonzero()
        if len(last):
            is_kept &= chances >= likeliest[last[0, 0]]
    if rows.min_p[row] > 0:
        is_kept &= values >= values.max() + rows.min_p[row].log()
    key = int(rows.keys[row]) % (1 << 64)
    kept = is_kept.nonzero().flatten()
    return int(kept[gumbel_argmax_reference(values[kept], 1.0, kept, key)])


def _adjusted(values: Tensor, rows: SamplingRows, row: int, slot: int) -> Tensor:
    """A row's logits after penalties and biases; a new tensor."""
    values = values.clone()
    if rows.penalties is not None:
        counts = rows.penalties.counts[slot]
        if rows.drafts is not None:
            before = rows.drafts.tokens[row - int(rows.drafts.depths[row]) : row].long()
            counts = counts + 2 * torch.bincount(before, minlength=len(counts))
        repetition, presence, frequency = rows.penalties.factors[row]
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(counts > 0, repeated, values)
        times = counts >> 1
        values = torch.where(times > 0, values - (presence + frequency * times), values)
    if rows.biases is not None:
        start, end = rows.biases.starts[row : row + 2].tolist()
        values[rows.biases.tokens[start:end].long()] += rows.biases.values[start:end]
    return values
