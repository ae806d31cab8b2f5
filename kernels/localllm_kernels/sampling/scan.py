"""The first pass over a row of logits, by many programs: penalties, biases, and the maximum of each
block of a few values, so that the second pass (`sampling/pick.py`) need not read the row again.

Penalties and biases change the row's logits in place: repetition (Keskar et al. 2019, section 4.1),
presence and frequency (OpenAI's API reference), bias, in this order. Penalties use a table of how
often each request has had each token, which stays on the device.
"""

import triton
import triton.language as tl

from localllm_kernels.sampling.noise import gumbel, winner


@triton.jit
def _penalized(values, columns, counts, factors_ptr, drafts_ptr, depth, HAS_DRAFTS: tl.constexpr):
    """`values` after penalties; the `depth` tokens before `drafts_ptr` count as generated."""
    repetition = tl.load(factors_ptr)
    presence, frequency = tl.load(factors_ptr + 1), tl.load(factors_ptr + 2)
    if HAS_DRAFTS:
        for i in range(1, depth + 1):
            counts += tl.where(columns == tl.load(drafts_ptr - i), 2, 0)
    repeated = tl.where(values > 0.0, values / repetition, values * repetition)
    values = tl.where(counts > 0, repeated, values)
    times = (counts >> 1).to(tl.float32)
    taken = presence + frequency * times
    return tl.where(times > 0.0, values - taken, values)


@triton.jit
def _bias(row_ptr, row, first, end, starts_ptr, tokens_ptr, biases_ptr, BLOCK: tl.constexpr):
    """The row's logits from `first` to `end` after biases, in place."""
    last = tl.load(starts_ptr + row + 1)
    for start in range(tl.load(starts_ptr + row), last, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tokens = tl.load(tokens_ptr + at, mask=at < last, other=-1)
        is_mine = (tokens >= first) & (tokens < end)
        values = tl.load(row_ptr + tokens, mask=is_mine, other=0.0)
        values += tl.load(biases_ptr + at, mask=is_mine, other=0.0)
        tl.store(row_ptr + tokens, values, mask=is_mine)


@triton.jit
def _scan_kernel(
    logits_ptr,
    slots_ptr,
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
    maxima_ptr,
    masses_ptr,
    winners_ptr,
    places_ptr,
    vocab,
    num_blocks,
    HAS_PENALTIES: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    HAS_DRAFTS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """BLOCKS blocks of WIDTH values per program. Stores the greatest value of each block, NaN if
    there is one; the block's mass, in units of exp(greatest value / temperature), if top-p will
    need it; and the program's winner, if nothing is filtered.
    """
    chunk, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    SIZE: tl.constexpr = WIDTH * BLOCKS
    row_ptr = logits_ptr + row.to(tl.int64) * vocab
    first = chunk * SIZE
    columns = first + tl.arange(0, SIZE)
    inside = columns < vocab
    values = tl.load(row_ptr + columns, mask=inside, other=float("-inf"))
    if HAS_PENALTIES:
        counts = tl.load(counts_ptr + slot * vocab + columns, mask=inside, other=0)
        depth = 0
        if HAS_DRAFTS:
            depth = tl.load(depths_ptr + row)
        values = _penalized(
            values, columns, counts, factors_ptr + 3 * row, drafts_ptr + row, depth, HAS_DRAFTS
        )
        tl.store(row_ptr + columns, values, mask=inside)
    if HAS_BIASES:
        tl.debug_barrier()  # a thread changes what another one has stored
        _bias(row_ptr, row, first, first + SIZE, starts_ptr, tokens_ptr, biases_ptr, SIZE)
        tl.debug_barrier()
        values = tl.load(row_ptr + columns, mask=inside, other=float("-inf"))
    blocks = tl.reshape(values, [BLOCKS, WIDTH])
    most = tl.max(blocks, axis=1)
    is_nan = tl.max((blocks != blocks).to(tl.int32), axis=1) > 0
    at = chunk * BLOCKS + tl.arange(0, BLOCKS)
    at_row = row.to(tl.int64) * num_blocks + at
    is_block = at < num_blocks
    tl.store(maxima_ptr + at_row, tl.where(is_nan, float("nan"), most), mask=is_block)
    temperature = tl.load(temperatures_ptr + row)
    if temperature != 0.0:
        top_k, top_p = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row)
        is_limited = (top_k > 0) & (top_k < vocab)
        if (top_p < 1.0) & (not is_limited):
            distance = blocks / temperature - (most / temperature)[:, None]
            masses = tl.sum(tl.exp(distance), axis=1)
            # A grammar may leave nothing of a block.
            masses = tl.where(most == float("-inf"), 0.0, masses)
            tl.store(masses_ptr + at_row, masses, mask=is_block)
        if (top_p >= 1.0) & (not is_limited) & (tl.load(min_p_ptr + row) <= 0.0):
            noisy = values / temperature + gumbel(tl.load(keys_ptr + row), columns)
            best, place = winner(tl.where(inside, noisy, float("-inf")), columns, vocab)
            of_chunk = row * tl.num_programs(0) + chunk
            tl.store(winners_ptr + of_chunk, best)
            tl.store(places_ptr + of_chunk, place)
