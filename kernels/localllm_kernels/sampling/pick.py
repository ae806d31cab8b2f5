"""The second pass over a row of logits, by one program: filters, and the draw.

Top-k, top-p and min-p each keep the values that reach a threshold: the greatest number that leaves
enough, that is k values or a mass of p. It is found by bisection on the bits of floats (whose order
is that of integers), in thirds or eighths per step.

The steps go over candidates: the values of the KEPT blocks with the greatest maxima, as
`sampling/scan.py` found them. Every value above the least of those maxima is a candidate, so a
threshold above it is the row's too. If the threshold is not above it, which takes a flat
distribution or a top-k above KEPT, the steps go over the row. Then

    token = argmax over values of at least the threshold of  value + g(key, id)

with the noise of `gumbel_argmax.py`. Only ids come back: -1 for a row that is not finite.

A draft has a row for each of its positions, and one more; each row counts the tokens drafted before
it. A second kernel records a draft's tokens as far as they agree with the drawn ones, since rows do
not wait for each other.
"""

import triton
import triton.language as tl

from localllm_kernels.sampling.noise import gumbel, ordered, winner


@triton.jit
def _weights(values, most, BY_MASS: tl.constexpr):
    if BY_MASS:
        return tl.exp(values - most)
    return (values > float("-inf")).to(tl.float32)


@triton.jit
def _next_bounds(low, high, step, found, target):
    """The bounds after a step; `found`: the count or mass at or above each of the pivots."""
    pivots = low + step * (tl.arange(0, found.shape[0]) + 1)
    num_enough = tl.sum(((found >= target) & (pivots < high)).to(tl.int64), axis=0)
    return low + step * num_enough, tl.minimum(low + step * (num_enough + 1), high)


@triton.jit
def _least_of(values, weights, most, low, target):
    """The greatest ordered integer with enough weight at or above it, from `low` to `most`."""
    high = ordered(most).to(tl.int64) + 1
    keys = ordered(values)
    while high - low > 1:
        # Two pivots, since candidates times pivots have to fit into the registers.
        step = tl.maximum((high - low) // 3, 1)
        pivots = low + step * (tl.arange(0, 2) + 1)
        is_over = keys[:, None] >= pivots.to(tl.int32)[None, :]
        found = tl.sum(tl.where(is_over, weights[:, None], 0.0), axis=0)
        low, high = _next_bounds(low, high, step, found, target)
    return low


@triton.jit
def _least_of_row(
    row_ptr, vocab, temperature, most, low, target, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    high = ordered(most).to(tl.int64) + 1
    while high - low > 1:
        step = tl.maximum((high - low) >> 3, 1)
        pivots = low + step * (tl.arange(0, 8) + 1)
        found = _above(row_ptr, vocab, temperature, most, pivots, BY_MASS, BLOCK)
        low, high = _next_bounds(low, high, step, found, target)
    return low


@triton.jit
def _above(row_ptr, vocab, temperature, most, pivots, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """For each of eight pivots, how many values of the row reach it, or their mass."""
    found = tl.zeros([8], tl.float32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        values = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf")) / temperature
        weights = _weights(values, most, BY_MASS)
        is_over = ordered(values)[:, None] >= pivots.to(tl.int32)[None, :]
        found += tl.sum(tl.where(is_over, weights[:, None], 0.0), axis=0)
    return found


@triton.jit
def _draw_of_row(row_ptr, vocab, temperature, low, key, BLOCK: tl.constexpr):
    """The winner among all values of at least `low`."""
    most_each = tl.full([BLOCK], float("-inf"), tl.float32)
    place_each = tl.zeros([BLOCK], tl.int32)
    for first in range(0, vocab, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        inside = columns < vocab
        values = tl.load(row_ptr + columns, mask=inside, other=float("-inf")) / temperature
        is_kept = inside & (ordered(values) >= low.to(tl.int32))
        values = tl.where(is_kept, values + gumbel(key, columns), float("-inf"))
        is_better = values > most_each
        most_each = tl.where(is_better, values, most_each)
        place_each = tl.where(is_better, columns, place_each)
    return winner(most_each, place_each, vocab)[1]


@triton.jit
def _filtered(
    row_ptr,
    maxima,
    masses_ptr,
    blocks_ptr,
    vocab,
    num_blocks,
    temperature,
    greatest,
    top_k,
    top_p,
    min_p,
    key,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The token of a row with filters; `greatest`: its greatest value before temperature."""
    most = greatest / temperature
    none = tl.full([], -2147483648, tl.int64)
    # The blocks with the greatest maxima, in their order; of equal ones as many as there is room
    # for.
    seen = (maxima > float("-inf")).to(tl.float32)
    least = _least_of(maxima, seen, greatest, none, KEPT)
    is_chosen = (ordered(maxima) >= least.to(tl.int32)) & (maxima > float("-inf"))
    at = tl.cumsum(is_chosen.to(tl.int32), axis=0) - 1
    tl.store(blocks_ptr + at, tl.arange(0, BLOCKS), mask=is_chosen & (at < KEPT))
    tl.debug_barrier()  # a thread reads what another one has stored
    num_chosen = tl.minimum(tl.sum(is_chosen.to(tl.int32), axis=0), KEPT)
    rank = tl.arange(0, KEPT * WIDTH) // WIDTH
    block = tl.load(blocks_ptr + rank, mask=rank < num_chosen, other=0)
    columns = block * WIDTH + tl.arange(0, KEPT * WIDTH) % WIDTH
    inside = (rank < num_chosen) & (columns < vocab)
    values = tl.load(row_ptr + columns, mask=inside, other=float("-inf")) / temperature
    # All values of the row above this are candidates. Those equal to it may not be, since the
    # division may have made values equal that were not.
    of_least = tl.min(tl.where(is_chosen, maxima, float("inf")), axis=0)
    has_others = tl.sum(seen, axis=0) > KEPT
    complete = tl.where(has_others, ordered(of_least / temperature).to(tl.int64), none - 1)

    low = none
    is_limited = (top_k > 0) & (top_k < vocab)
    if is_limited:
        count = top_k.to(tl.float32)
        low = _least_of(values, _weights(values, most, False), most, none, count)
        if low <= complete:
            low = _least_of_row(row_ptr, vocab, temperature, most, none, count, False, BLOCK)
    if top_p < 1.0:
        weights = _weights(values, most, True)
        if is_limited & (low > complete):
            is_over = ordered(values) >= low.to(tl.int32)
            total = tl.sum(tl.where(is_over, weights, 0.0), axis=0)
        elif is_limited:
            pivots = low + tl.zeros([8], tl.int64)
            total = tl.max(_above(row_ptr, vocab, temperature, most, pivots, True, BLOCK), axis=0)
        else:
            each = tl.arange(0, BLOCKS)
            masses = tl.load(masses_ptr + each, mask=each < num_blocks, other=0.0)
            total = tl.sum(masses * tl.exp(maxima / temperature - most), axis=0)
        enough = top_p * total
        of_candidates = _least_of(values, weights, most, none, enough)
        if of_candidates > complete:
            low = tl.maximum(low, of_candidates)
        else:
            low = _least_of_row(row_ptr, vocab, temperature, most, low, enough, True, BLOCK)
    if min_p > 0.0:
        low = tl.maximum(low, ordered(most + tl.log(min_p)).to(tl.int64))
    if low > complete:
        is_kept = inside & (ordered(values) >= low.to(tl.int32))
        noisy = tl.where(is_kept, values + gumbel(key, columns), float("-inf"))
        place = winner(noisy, columns, vocab)[1]
    else:
        place = _draw_of_row(row_ptr, vocab, temperature, low, key, BLOCK)
    return place


@triton.jit
def _pick_kernel(
    logits_ptr,
    slots_ptr,
    newest_ptr,
    counts_ptr,
    temperatures_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    keys_ptr,
    maxima_ptr,
    masses_ptr,
    winners_ptr,
    places_ptr,
    blocks_ptr,
    ids_ptr,
    vocab,
    num_blocks,
    num_chunks,
    HAS_PENALTIES: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHUNKS: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCKS, CHUNKS: their numbers rounded up to powers of two; BLOCK: see sample.py."""
    row = tl.program_id(0)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        tl.store(ids_ptr + row, tl.full([], -1, tl.int64))
        return
    row_ptr = logits_ptr + row.to(tl.int64) * vocab
    each = tl.arange(0, BLOCKS)
    maxima_ptr += row.to(tl.int64) * num_blocks
    maxima = tl.load(maxima_ptr + each, mask=each < num_blocks, other=float("-inf"))
    # A NaN would be lost in a maximum.
    is_nan = tl.max((maxima != maxima).to(tl.int32), axis=0) > 0
    greatest = tl.max(maxima, axis=0)
    temperature = tl.load(temperatures_ptr + row)
    top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    is_limited = (top_k > 0) & (top_k < vocab)
    if is_nan | (greatest == float("-inf")) | (greatest == float("inf")):
        place = tl.full([], -1, tl.int32)
    elif temperature == 0.0:
        block = tl.min(tl.where(maxima == greatest, each, BLOCKS), axis=0)
        columns = block * WIDTH + tl.arange(0, WIDTH)
        values = tl.load(row_ptr + columns, mask=columns < vocab, other=float("-inf"))
        place = winner(values, columns, vocab)[1]
    elif is_limited | (top_p < 1.0) | (min_p > 0.0):
        place = _filtered(
            row_ptr, maxima, masses_ptr + row.to(tl.int64) * num_blocks, blocks_ptr + row * KEPT,
            vocab, num_blocks, temperature, greatest, top_k, top_p, min_p,
            tl.load(keys_ptr + row), WIDTH, BLOCKS, KEPT, BLOCK,
        )  # fmt: skip
    else:
        chunk = tl.arange(0, CHUNKS)
        of_row = row * num_chunks + chunk
        is_chunk = chunk < num_chunks
        best = tl.load(winners_ptr + of_row, mask=is_chunk, other=float("-inf"))
        places = tl.load(places_ptr + of_row, mask=is_chunk, other=vocab)
        place = winner(best, places, vocab)[1]
    tl.store(ids_ptr + row, place.to(tl.int64))
    if not HAS_DRAFTS:
        # A row that is not finite has no token; its request may be a step ahead, so 0 is stored.
        token = tl.maximum(place, 0)
        tl.store(newest_ptr + slot, token.to(tl.int64))
        if HAS_PENALTIES:
            counts_ptr += slot * vocab
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
    """Record the tokens of a request, up to the first one that its draft does not have."""
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
