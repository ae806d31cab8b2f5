"""The next token of each request of a batch, on the device: penalties, filters, a keyed draw.

What is kept after top-k, top-p and min-p is what is at least a threshold, and each threshold is the
greatest number at which enough is left: k values, or a mass of p. It is found by bisection on the
bits of floats (whose order is that of integers), three bits a pass over the row, which needs
neither a sort nor memory. Then

    token = argmax over values of at least the threshold of  value + g(key, id)

with the noise of `gumbel_argmax.py`. Only ids come back: -1 for a row that is not finite.

Penalties and biases change the row's logits in place before anything is read of them: repetition
(Keskar et al. 2019, section 4.1), presence and frequency (OpenAI's API reference), bias, in this
order. Penalties go by a table of how often each request has had each token, which stays on the
device and is kept by this kernel: so the next step needs nothing of the host.

A draft has a row for each of its positions, and one more; each counts what is drafted before it.
Its tokens are booked as far as they agree with what is drawn, by a second kernel, since rows do not
wait for each other.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from localllm_kernels.aot import AotSpec
from localllm_kernels.gumbel_argmax import gumbel_argmax_reference

BLOCK = 2048


@triton.jit
def _ordered(values):
    """Integers in the order of the floats."""
    bits = values.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _mix32(bits):
    """The hash of gumbel_argmax.py; uint32."""
    bits = (bits ^ (bits >> 16)) * 0x7FEB352D
    bits = (bits ^ (bits >> 15)) * 0x846CA68B
    return bits ^ (bits >> 16)


@triton.jit
def _gumbel(key_low, key_high, ids):
    """The noise of gumbel_argmax.py in float32. Above a half u is held as 1 - w: a float near one
    has no digits left (log(1 - w) as in Kahan's log1p).
    """
    bits = _mix32(_mix32(ids.to(tl.uint32) * 0x9E3779B1 + key_low) ^ key_high)
    unit = 2.3283064365386963e-10  # 2^-32
    u = (bits.to(tl.float32) + 0.5) * unit
    w = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * unit
    is_high = (bits >> 31) != 0
    rest = 1.0 - w
    taken = rest - 1.0
    log_rest = tl.log(tl.where(is_high, rest, u))
    is_tiny = taken == 0.0
    high = tl.where(is_tiny, -w, log_rest * (-w) / tl.where(is_tiny, 1.0, taken))
    return -tl.log(-tl.where(is_high, high, log_rest))


@triton.jit
def _enough(row_ptr, vocab, temperature, most, pivots, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """For each of eight pivots how many values are at least it, or their mass; [8] float32."""
    found = tl.zeros([8], tl.float32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        values = tl.load(row_ptr + columns, mask=inside, other=float("-inf")) / temperature
        weights = inside.to(tl.float32)
        if BY_MASS:
            weights = tl.exp(values - most)
        is_over = _ordered(values).to(tl.int64)[:, None] >= pivots[None, :]
        found += tl.sum(tl.where(is_over, weights[:, None], 0.0), axis=0)
    return found


@triton.jit
def _threshold(
    row_ptr, vocab, temperature, most, low, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The greatest ordered integer with enough values at or above it; `low` has enough."""
    high = _ordered(most).to(tl.int64) + 1  # nothing is there
    while high - low > 1:
        step = tl.maximum((high - low) >> 3, 1)
        pivots = low + step * (tl.arange(0, 8) + 1)
        found = _enough(row_ptr, vocab, temperature, most, pivots, BY_MASS, BLOCK)
        num_enough = tl.sum(((found >= target) & (pivots < high)).to(tl.int64), axis=0)
        high = tl.minimum(low + step * (num_enough + 1), high)
        low += step * num_enough
    return low


@triton.jit
def _penalize(
    row_ptr,
    vocab,
    counts_ptr,
    factors_ptr,
    drafts_ptr,
    depth,
    HAS_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The row's logits after penalties, in place; `depth` drafted tokens stand in front of
    `drafts_ptr`, which count like the request's own.
    """
    repetition = tl.load(factors_ptr)
    presence, frequency = tl.load(factors_ptr + 1), tl.load(factors_ptr + 2)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        for first in range(0, vocab, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            inside = columns < vocab
            counts = tl.load(counts_ptr + columns, mask=inside, other=0)
            if HAS_DRAFTS:
                for i in range(1, depth + 1):
                    counts += tl.where(columns == tl.load(drafts_ptr - i), 2, 0)
            values = tl.load(row_ptr + columns, mask=inside, other=0.0)
            repeated = tl.where(values > 0.0, values / repetition, values * repetition)
            values = tl.where(counts > 0, repeated, values)
            times = (counts >> 1).to(tl.float32)
            taken = presence + frequency * times
            values = tl.where(times > 0.0, values - taken, values)
            tl.store(row_ptr + columns, values, mask=inside)
        tl.debug_barrier()  # what one thread has stored another one reads


@triton.jit
def _bias(row_ptr, row, starts_ptr, tokens_ptr, biases_ptr, BLOCK: tl.constexpr):
    """The row's logits after biases, in place."""
    end = tl.load(starts_ptr + row + 1)
    for first in range(tl.load(starts_ptr + row), end, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < end
        tokens = tl.load(tokens_ptr + at, mask=inside, other=0)
        values = tl.load(row_ptr + tokens, mask=inside, other=0.0)
        values += tl.load(biases_ptr + at, mask=inside, other=0.0)
        tl.store(row_ptr + tokens, values, mask=inside)
    tl.debug_barrier()


@triton.jit
def _draw(
    row_ptr,
    row,
    vocab,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    BLOCK: tl.constexpr,
):
    """The token of a row, -1 where it is not finite."""
    # The greatest value and its first place; a NaN would be lost in a maximum.
    most_each = tl.full([BLOCK], float("-inf"), tl.float32)
    place_each = tl.zeros([BLOCK], tl.int32)
    is_nan = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        is_nan |= (values != values).to(tl.int32)
        is_better = values > most_each
        most_each = tl.where(is_better, values, most_each)
        place_each = tl.where(is_better, columns, place_each)
    most = tl.max(most_each, axis=0)
    temperature = tl.load(temperatures_ptr + row)
    place = tl.min(tl.where(most_each == most, place_each, vocab), axis=0)
    if (tl.max(is_nan, axis=0) > 0) | (most == float("-inf")) | (most == float("inf")):
        place = tl.full([], -1, tl.int32)
    elif temperature != 0.0:
        place = _draw_by_chance(
            row_ptr, row, vocab, temperature, most / temperature, top_k_ptr, top_p_ptr, min_p_ptr,
            keys_ptr, BLOCK,
        )  # fmt: skip
    return place


@triton.jit
def _draw_by_chance(
    row_ptr,
    row,
    vocab,
    temperature,
    most,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    BLOCK: tl.constexpr,
):
    """The token of a row that is finite, whose greatest value is `most` after the temperature."""
    low = tl.full([], -2147483648, tl.int64)
    top_k = tl.load(top_k_ptr + row)
    if (top_k > 0) & (top_k < vocab):
        low = _threshold(row_ptr, vocab, temperature, most, low, top_k.to(tl.float32), False, BLOCK)
    top_p = tl.load(top_p_ptr + row)
    if top_p < 1.0:
        pivots = low + tl.zeros([8], tl.int64)
        total = tl.max(_enough(row_ptr, vocab, temperature, most, pivots, True, BLOCK), axis=0)
        low = _threshold(row_ptr, vocab, temperature, most, low, top_p * total, True, BLOCK)
    min_p = tl.load(min_p_ptr + row)
    if min_p > 0.0:
        low = tl.maximum(low, _ordered(most + tl.log(min_p)).to(tl.int64))
    key = tl.load(keys_ptr + row)
    key_low, key_high = (key & 0xFFFFFFFF).to(tl.uint32), ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    most_each = tl.full([BLOCK], float("-inf"), tl.float32)
    place_each = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        values = tl.load(row_ptr + columns, mask=inside, other=float("-inf")) / temperature
        is_kept = inside & (_ordered(values).to(tl.int64) >= low)
        values = tl.where(is_kept, values + _gumbel(key_low, key_high, columns), float("-inf"))
        is_better = values > most_each
        most_each = tl.where(is_better, values, most_each)
        place_each = tl.where(is_better, columns, place_each)
    winner = tl.max(most_each, axis=0)
    return tl.min(tl.where(most_each == winner, place_each, vocab), axis=0)


@triton.jit
def _sample_kernel(
    logits_ptr,
    slots_ptr,
    newest_ptr,
    counts_ptr,
    factors_ptr,
    starts_ptr,
    tokens_ptr,
    biases_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    depths_ptr,
    drafts_ptr,
    ids_ptr,
    vocab,
    HAS_PENALTIES: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * vocab
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        tl.store(ids_ptr + row, tl.full([], -1, tl.int64))
        return
    counts_ptr += slot * vocab
    if HAS_PENALTIES:
        depth = 0
        if HAS_DRAFTS:
            depth = tl.load(depths_ptr + row)
        _penalize(
            row_ptr, vocab, counts_ptr, factors_ptr + 3 * row, drafts_ptr + row, depth, HAS_DRAFTS,
            BLOCK,
        )  # fmt: skip
    if HAS_BIASES:
        _bias(row_ptr, row, starts_ptr, tokens_ptr, biases_ptr, BLOCK)
    place = _draw(
        row_ptr, row, vocab, temperatures_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, BLOCK
    )
    tl.store(ids_ptr + row, place.to(tl.int64))
    if not HAS_DRAFTS:
        # A row that is not finite has no token, but its request may be a step ahead already.
        token = tl.maximum(place, 0)
        tl.store(newest_ptr + slot, token.to(tl.int64))
        if HAS_PENALTIES:
            tl.store(counts_ptr + token, tl.load(counts_ptr + token) + 2)


@triton.jit
def _book_kernel(
    ids_ptr,
    slots_ptr,
    newest_ptr,
    counts_ptr,
    depths_ptr,
    drafts_ptr,
    vocab,
    HAS_PENALTIES: tl.constexpr,
):
    """The tokens of a request, from its first row to the first that its draft has not."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if (slot < 0) | (tl.load(depths_ptr + row) > 0):
        return
    counts_ptr += slot * vocab
    has_more = row >= 0  # always
    while has_more:
        drawn = tl.load(ids_ptr + row)
        token = tl.maximum(drawn, 0)
        tl.store(newest_ptr + slot, token)
        if HAS_PENALTIES:
            tl.store(counts_ptr + token, tl.load(counts_ptr + token) + 2)
            tl.debug_barrier()  # the next may be the same
        has_more = (drawn >= 0) & (drawn == tl.load(drafts_ptr + row))
        row += 1


@dataclass(frozen=True, slots=True)
class Penalties:
    """`counts`: int32 [slots, vocab], for each request twice the times that it generated a token,
    plus one where its prompt has it; `factors`: float32 [rows, 3], repetition, presence and
    frequency, which are 1, 0 and 0 for none.
    """

    counts: Tensor
    factors: Tensor


@dataclass(frozen=True, slots=True)
class Biases:
    """Of tokens from `starts[i]` to `starts[i + 1]` in row i, each token once."""

    starts: Tensor  # int32 [rows + 1]
    tokens: Tensor  # int32 [count]
    values: Tensor  # float32 [count]


@dataclass(frozen=True, slots=True)
class Drafts:
    """What is drafted for the positions of the rows; a request's rows stand together, in order.

    `tokens`: of each row, -1 behind the last one of a draft; `depths`: how many tokens are drafted
    before a row's, 0 in the first row of each request.
    """

    depths: Tensor  # int32 [rows]
    tokens: Tensor  # int32 [rows]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """How each row is sampled; all [rows] but `newest`.

    `slots`: the place of the row's request in `newest`, int64 [slots], where its token is left,
    and in the table of counts; -1 for a row that is not sampled. A temperature of 0 is greedy;
    `top_k` 0, `top_p` 1 and `min_p` 0 switch those filters off; `keys`: of the noise, 64 bits.
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


def sample(logits: Tensor, rows: SamplingRows) -> Tensor:
    """`logits`: float32 [rows, vocab], changed where there are penalties or biases -> ids, int64
    [rows]; -1 for a row that is not finite, or not sampled. Tokens are booked in `newest` and in
    the counts; of a draft those that are drawn, and the first that is drawn instead.
    """
    assert logits.is_contiguous()
    penalties, biases, drafts = rows.penalties, rows.biases, rows.drafts
    num_rows, vocab = logits.shape
    counts = rows.slots if penalties is None else penalties.counts
    depths, tokens = (rows.slots,) * 2 if drafts is None else (drafts.depths, drafts.tokens)
    ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows:
        _sample_kernel[(num_rows,)](
            logits,
            rows.slots,
            rows.newest,
            counts,
            logits if penalties is None else penalties.factors,
            rows.slots if biases is None else biases.starts,
            rows.slots if biases is None else biases.tokens,
            logits if biases is None else biases.values,
            rows.temperatures,
            rows.top_k,
            rows.top_p,
            rows.min_p,
            rows.keys,
            depths,
            tokens,
            ids,
            vocab,
            HAS_PENALTIES=penalties is not None,
            HAS_BIASES=biases is not None,
            HAS_DRAFTS=drafts is not None,
            BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
            num_warps=16,
        )
        if drafts is not None:
            _book_kernel[(num_rows,)](
                ids,
                rows.slots,
                rows.newest,
                counts,
                depths,
                tokens,
                vocab,
                HAS_PENALTIES=penalties is not None,
                num_warps=1,
            )
    return ids


def sample_reference(logits: Tensor, rows: SamplingRows) -> Tensor:
    """The same with torch's operators, a row at a time; `logits` stay as they are."""
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
        # Nothing holds behind a token that is not the draft's.
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


AOT_SPECS = [
    AotSpec(
        _sample_kernel,
        name,
        {
            "logits_ptr": "*fp32",
            **dict.fromkeys(("slots_ptr", "counts_ptr", "starts_ptr", "tokens_ptr"), "*i32"),
            "newest_ptr": "*i64",
            **dict.fromkeys(("biases_ptr", "factors_ptr"), "*fp32"),
            "temperatures_ptr": "*fp32",
            "top_k_ptr": "*i32",
            "top_p_ptr": "*fp32",
            "min_p_ptr": "*fp32",
            "keys_ptr": "*i64",
            "depths_ptr": "*i32",
            "drafts_ptr": "*i32",
            "ids_ptr": "*i64",
            "vocab": "i32",
        },
        {
            "HAS_PENALTIES": has_all,
            "HAS_BIASES": has_all,
            "HAS_DRAFTS": has_all,
            "BLOCK": BLOCK,
        },
        num_warps=16,
    )
    for name, has_all in (("any filters", False), ("penalties, biases and drafts", True))
]
AOT_SPECS.append(
    AotSpec(
        _book_kernel,
        "what is drawn of drafts",
        {
            **dict.fromkeys(("ids_ptr", "newest_ptr"), "*i64"),
            **dict.fromkeys(("slots_ptr", "counts_ptr", "depths_ptr", "drafts_ptr"), "*i32"),
            "vocab": "i32",
        },
        {"HAS_PENALTIES": True},
        num_warps=1,
    )
)
