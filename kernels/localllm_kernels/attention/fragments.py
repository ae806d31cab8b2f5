"""Attention of few new tokens over keys in 8 or 4 bits, on the matrix units, without shared memory.

The formula is that of `paged_attention.py`, and keys are split among programs as in
`attention/parts.py`. In a step of `matrix_units.py`, sixteen keys are the rows and eight queries
the columns; for the values, sixteen dimensions are the rows, and the sum is over sixteen keys. A
thread reads exactly the codes that it multiplies, since neither the order of dimensions nor that of
keys matters as long as both operands have the same (fragments_4_bits.py has that of 4 bits):

    keys     lane 4 g + t: of keys g and g + 8, dimensions 64 p + 16 t + {0 to 15}
    values   of keys 2 t, 2 t + 1, 2 t + 8 and 2 t + 9, the g-th eighth of the dimensions

The result of the first product, queries by keys, is an operand of the second, except that its rows
are columns there; `movmatrix` transposes it. Each warp has its own 32 keys per turn, and its own
maximum, sum and values until the end.
"""

import triton
import triton.language as tl

from localllm_kernels.attention.four_bits_kernels import NUM_MEANS, OWN_KEYS, load_scales, mean_of
from localllm_kernels.attention.fragments_4_bits import (
    found_turned_back,
    key_pairs_4,
    numbers_of,
    offset_of_key,
    offsets_of_columns,
    turned_fours,
    words_of,
)
from localllm_kernels.attention.own_keys import shares
from localllm_kernels.attention.parts import tiles_of_part
from localllm_kernels.primitives.arrival import is_last
from localllm_kernels.primitives.code_pairs_8 import code_pairs_8
from localllm_kernels.primitives.log2 import log2
from localllm_kernels.primitives.matrix_units import (
    four_of,
    max_of_rows,
    multiply_add,
    pack_pair,
    transpose_pairs,
    two_as_four,
)
from localllm_kernels.products.int4_turn import split_four

KEYS_EACH = 32  # per warp and turn
CHUNKS = tl.constexpr(2)  # of sixteen keys


@triton.jit(do_not_specialize=["num_splits", "max_blocks", "most_queries"])
def _fragment_decode_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    key_scales_ptr,
    value_scales_ptr,
    tables_ptr,
    starts_ptr,
    lengths_ptr,
    out_ptr,
    parts_ptr,
    counters_ptr,
    own_ptr,
    factors_ptr,
    means_ptr,
    scale,
    window,
    max_blocks,
    num_splits,
    most_queries,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CACHE_BLOCK: tl.constexpr,
    KIND: tl.constexpr,
    OWN: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    NUM_HIDDEN: tl.constexpr,
    EIGHTS: tl.constexpr,
    WARPS: tl.constexpr,
    MIN_TURNS: tl.constexpr,
    MAX_PARTS: tl.constexpr,
    PTX: tl.constexpr,
):
    """`query_ptr`: int64, four 16-bit floats each, of the type of `out_ptr`, or over keys in 4 bits
    this type itself; `key_ptr`, `value_ptr`: int32, four bytes each; EIGHTS: the number of queries
    over 8, rounded up.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    GROUP: tl.constexpr = HEADS // KV_HEADS
    THREADS: tl.constexpr = 32 * WARPS
    STEPS: tl.constexpr = HEAD_DIM // 16  # of the first product; also the second's row tiles
    TURN: tl.constexpr = WARPS * 16 * CHUNKS
    seq, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first_query = tl.load(starts_ptr + seq)
    num_queries = tl.load(starts_ptr + seq + 1) - first_query
    length = tl.load(lengths_ptr + seq).to(tl.int32)

    first_turn = 0
    if HAS_WINDOW:
        first_turn = tl.maximum(length - num_queries - window + 1, 0) // TURN
    num_turns = tl.cdiv(length, TURN) - first_turn
    low, high, num_parts = tiles_of_part(num_turns, num_splits, split, MIN_TURNS)
    # Requests with more queries belong to another launch.
    if (split >= num_parts) | (num_queries > most_queries):
        return
    first_key = (first_turn + low) * TURN
    end_key = tl.minimum((first_turn + high) * TURN, length)

    thread = tl.arange(0, THREADS)
    lane = thread % 32
    g, t = lane // 4, lane % 4
    nothing = tl.zeros([THREADS], tl.float32)
    factors_ptr += kv_head * HEAD_DIM
    means_ptr += kv_head * NUM_MEANS * HEAD_DIM
    queries, offsets = (), ()
    for n in tl.static_range(EIGHTS):
        queries = queries + _fours_of_queries(
            query_ptr, first_query, num_queries, kv_head, 8 * n + g, t, factors_ptr,
            HEADS, GROUP, HEAD_DIM, KIND, dtype, PTX,
        )  # fmt: skip
        if KIND == 3:
            offsets = offsets + offsets_of_columns(
                query_ptr, first_query, num_queries, kv_head, 8 * n, t, means_ptr, scale,
                HEADS, GROUP, HEAD_DIM,
            )  # fmt: skip
    positions, most, total = (), (), ()
    for n in tl.static_range(EIGHTS):
        for c in tl.static_range(2):
            positions = positions + (length - num_queries + (8 * n + 2 * t + c) // GROUP,)
            most = most + (tl.full([THREADS], float("-inf"), tl.float32),)
            total = total + (nothing,)
    values = (nothing,) * (4 * STEPS * EIGHTS)
    table_ptr = tables_ptr + seq.to(tl.int64) * max_blocks
    for turn in range(first_key, end_key, TURN):
        start = turn + (thread // 32) * (16 * CHUNKS)
        rows, scores, value_scales = (), (), ()
        for chunk in tl.static_range(CHUNKS):
            first = start + 16 * chunk
            block = tl.load(table_ptr + first // CACHE_BLOCK, mask=first < length, other=0)
            row = (block.to(tl.int64) * KV_HEADS + kv_head) * CACHE_BLOCK + first % CACHE_BLOCK
            rows = rows + (row,)
            found, of_values = _scores_of_chunk(
                key_ptr, key_scales_ptr, value_scales_ptr, queries, offsets, row, first, length,
                g, t, positions, scale, window, HEAD_DIM, KIND, OWN, HAS_WINDOW, NUM_HIDDEN,
                EIGHTS, dtype, PTX,
            )  # fmt: skip
            scores, value_scales = scores + found, value_scales + of_values
        # Eighth n, column c, chunk k, half h: scores[4 * (k * EIGHTS + n) + 2 * h + c].
        most, total, keep, weights = _with_turn(most, total, scores, value_scales, EIGHTS, PTX)
        kept_values = ()
        for n in tl.static_range(EIGHTS):
            for at in tl.static_range(4 * STEPS):
                kept_values = kept_values + (values[4 * STEPS * n + at] * keep[2 * n + at % 2],)
        values = kept_values
        for k in tl.static_range(CHUNKS):
            turned = ()
            for n in tl.static_range(EIGHTS):
                for h in tl.static_range(2):
                    first_column = weights[2 * CHUNKS * 2 * n + 2 * k + h]
                    second_column = weights[2 * CHUNKS * (2 * n + 1) + 2 * k + h]
                    pair = pack_pair(first_column, second_column, dtype, PTX)
                    turned = turned + (transpose_pairs(pair, dtype, PTX),)
            words = ()
            for h in tl.static_range(2):
                for j in tl.static_range(2):
                    row = rows[k] + 2 * t + j + 8 * h
                    words = words + _value_words(value_ptr, row, g, HEAD_DIM, KIND)
            more = ()
            for n in tl.static_range(EIGHTS):
                columns = two_as_four(turned[2 * n], turned[2 * n + 1])
                for step in tl.static_range(STEPS):
                    dims = _value_pairs(words, step, STEPS, KIND, dtype, PTX)
                    sums = four_of(values, STEPS * n + step)
                    more = more + multiply_add(dims, columns, sums, dtype, PTX)
            values = more
    found, mosts, totals = _of_all_warps(values, most, total, WARPS, STEPS)
    if num_parts > 1:
        task = seq * KV_HEADS + kv_head
        PART: tl.constexpr = 32 * EIGHTS * (4 * STEPS + 4)
        parts_ptr += task.to(tl.int64) * num_splits * PART
        _store_part(parts_ptr + split * PART, found, mosts, totals)
        if not is_last(counters_ptr + task, num_parts):
            return
        found, mosts, totals = _of_all_parts(
            parts_ptr, num_parts, found, totals, PART, MAX_PARTS, STEPS
        )
    _store_results(
        found, mosts, totals, out_ptr, own_ptr, first_query, num_queries, kv_head,
        HEADS, GROUP, HEAD_DIM, KIND, OWN, NUM_HIDDEN,
    )  # fmt: skip


@triton.jit
def _fours_of_queries(
    query_ptr, first_query, num_queries, kv_head, column, t, factors_ptr,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, KIND: tl.constexpr,
    dtype: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """The operands of all steps of each lane's query, int64 [threads] each."""
    token = column // GROUP
    row = (first_query + token).to(tl.int64) * HEADS + kv_head * GROUP + column % GROUP
    if KIND == 3:
        return turned_fours(
            query_ptr, row, token < num_queries, t, factors_ptr, HEAD_DIM, dtype, PTX
        )
    else:
        fours = ()
        for step in tl.static_range(HEAD_DIM // 16):
            four = row * (HEAD_DIM // 4) + step // 4 * 16 + 4 * t + step % 4
            values = tl.load(query_ptr + four, mask=token < num_queries, other=0)
            fours = fours + (_second_third_exchanged(values),)
        return fours


@triton.jit
def _scores_of_chunk(
    key_ptr, key_scales_ptr, value_scales_ptr, queries, offsets, row, first, length, g, t,
    positions, scale, window, HEAD_DIM: tl.constexpr, KIND: tl.constexpr, OWN: tl.constexpr,
    HAS_WINDOW: tl.constexpr, NUM_HIDDEN: tl.constexpr, EIGHTS: tl.constexpr, dtype: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """The scores of all queries with sixteen keys from `row` on, at position `first`, and the
    scales of their values.
    """
    STEPS: tl.constexpr = HEAD_DIM // 16
    pairs, key_scales, means, value_scales, scores = (), (), (), (), ()
    for h in tl.static_range(2):
        pairs = pairs + _key_pairs(key_ptr, row + g + 8 * h, t, HEAD_DIM, KIND, dtype, PTX)
    for h in tl.static_range(2):
        at, is_key = row + g + 8 * h, first + g + 8 * h < length
        its_scale = load_scales(key_scales_ptr, at, is_key, KIND)
        key_scales, means = key_scales + (its_scale * scale,), means + (mean_of(its_scale),)
        value_scales = value_scales + (load_scales(value_scales_ptr, at, is_key, KIND),)
    for n in tl.static_range(EIGHTS):
        sums = _queries_by_keys(queries, pairs, n, STEPS, dtype, PTX)
        products = ()
        for c in tl.static_range(4):
            product = sums[c] * key_scales[c // 2]
            if KIND == 3:
                product += offset_of_key(offsets, means[c // 2], 8 * n + c % 2)
            products = products + (product,)
        scores = scores + _scores_of_keys(
            products, first + g, positions[2 * n], positions[2 * n + 1], window,
            OWN, HAS_WINDOW, NUM_HIDDEN,
        )  # fmt: skip
    return scores, value_scales


@triton.jit
def _store_results(
    found, mosts, totals, out_ptr, own_ptr, first_query, num_queries, kv_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, KIND: tl.constexpr,
    OWN: tl.constexpr, NUM_HIDDEN: tl.constexpr,
):  # fmt: skip
    """`found`: values [32, places] of all keys, with the maxima and sums of a lane's queries."""
    STEPS: tl.constexpr = HEAD_DIM // 16
    lanes, places = tl.arange(0, 32)[:, None], tl.arange(0, found.shape[1])[None, :]
    query = 8 * (places // (4 * STEPS)) + 2 * (lanes % 4) + places % 2
    step, dim = places // 4 % STEPS, places % 4 // 2
    if KIND == 3:
        found = found_turned_back(found, STEPS)
        dim += step // (STEPS // 2) * (HEAD_DIM // 2) + lanes // 4 * (HEAD_DIM // 16)
        dim += 2 * (step % (STEPS // 2))
    else:
        dim += lanes // 4 * (HEAD_DIM // 8) + 2 * step
    token = query // GROUP
    row = (first_query + token).to(tl.int64) * HEADS + kv_head * GROUP + query % GROUP
    sums, is_row = _of_query(totals, places, STEPS), token < num_queries
    if OWN:
        greatest, at = _of_query(mosts, places, STEPS), own_ptr + row * (HEAD_DIM + 4)
        own_most = tl.load(at + HEAD_DIM, mask=is_row, other=float("-inf"))
        keep, own_keep = shares(greatest, own_most)
        sums = sums * keep + tl.load(at + HEAD_DIM + 1, mask=is_row, other=0.0) * own_keep
        found = found * keep + tl.load(at + dim, mask=is_row, other=0.0) * own_keep
    if NUM_HIDDEN:
        sums = tl.where(sums == 0, 1.0, sums)
    result = (found / sums).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * HEAD_DIM + dim, result, mask=is_row)


@triton.jit
def _queries_by_keys(
    queries, pairs, n: tl.constexpr, STEPS: tl.constexpr, dtype: tl.constexpr, PTX: tl.constexpr
):
    """The products of sixteen keys with the n-th eight queries."""
    sums = (tl.zeros([queries[0].shape[0]], tl.float32),) * 4
    for step in tl.static_range(STEPS):
        keys = (
            pairs[2 * step],
            pairs[2 * STEPS + 2 * step],
            pairs[2 * step + 1],
            pairs[2 * STEPS + 2 * step + 1],
        )
        sums = multiply_add(keys, queries[n * STEPS + step], sums, dtype, PTX)
    return sums


@triton.jit
def _scores_of_keys(
    products, key, even_position, odd_position, window,
    OWN: tl.constexpr, HAS_WINDOW: tl.constexpr, NUM_HIDDEN: tl.constexpr,
):  # fmt: skip
    """The scores of two queries with `key` and the eighth key after it; -inf if not seen."""
    positions, scores = (even_position, odd_position), ()
    for c in tl.static_range(4):
        its_key = key + 8 * (c // 2)
        is_seen = its_key <= positions[c % 2]
        if OWN:
            is_seen = its_key < positions[c % 2] // OWN_KEYS * OWN_KEYS
        if HAS_WINDOW:
            is_seen &= its_key > positions[c % 2] - window
        if NUM_HIDDEN:
            is_seen &= its_key >= NUM_HIDDEN
        scores = scores + (tl.where(is_seen, products[c], float("-inf")),)
    return scores


@triton.jit
def _with_turn(most, total, scores, value_scales, EIGHTS: tl.constexpr, PTX: tl.constexpr):
    """Maxima and sums with the scores of a turn, factors on the values so far, and the weights on
    those of the turn: column c of eighth n, half h of chunk k at 2 · CHUNKS · (2 n + c) + 2 k + h.
    """
    most_now, total_now, keep, weights = (), (), (), ()
    for n in tl.static_range(EIGHTS):
        for c in tl.static_range(2):
            greatest = most[2 * n + c]
            of_turn = scores[4 * n + c]
            for k in tl.static_range(CHUNKS):
                for h in tl.static_range(2):
                    of_turn = tl.maximum(of_turn, scores[4 * (k * EIGHTS + n) + 2 * h + c])
            greater = tl.maximum(greatest, max_of_rows(of_turn, PTX))
            # If a query has seen nothing yet, nothing is subtracted from its minus infinities.
            reference = tl.where(greater == float("-inf"), 0.0, greater)
            kept = tl.exp2(greatest - reference)
            sum_now = total[2 * n + c] * kept
            for k in tl.static_range(CHUNKS):
                for h in tl.static_range(2):
                    weight = tl.exp2(scores[4 * (k * EIGHTS + n) + 2 * h + c] - reference)
                    sum_now += weight
                    weights = weights + (weight * value_scales[2 * k + h],)
            most_now, total_now = most_now + (greater,), total_now + (sum_now,)
            keep = keep + (kept,)
    return most_now, total_now, keep, weights


@triton.jit
def _of_all_warps(values, most, total, WARPS: tl.constexpr, STEPS: tl.constexpr):
    """Values [32, places], maxima and sums [32] of a lane's queries, over all warps' keys."""
    factors, mosts, totals, scaled = (), (), (), ()
    for at in tl.static_range(len(most)):
        greatest = tl.max(tl.reshape(most[at], [WARPS, 32]), axis=0)
        reference = tl.where(greatest == float("-inf"), 0.0, greatest)
        of_threads = tl.broadcast_to(reference[None, :], [WARPS, 32])
        factors = factors + (tl.exp2(most[at] - tl.reshape(of_threads, [32 * WARPS])),)
        mosts = mosts + (greatest,)
        over_warps = tl.sum(tl.reshape(total[at] * factors[at], [WARPS, 32]), axis=0)
        over_keys = tl.sum(tl.reshape(over_warps, [8, 4]), axis=0)
        totals = totals + (tl.reshape(tl.broadcast_to(over_keys[None, :], [8, 4]), [32]),)
    for at in tl.static_range(len(values)):
        scaled = scaled + (values[at] * factors[at // (4 * STEPS) * 2 + at % 2],)
    joined = tl.reshape(_joined(scaled), [WARPS, 32, len(values)])
    return tl.sum(joined, axis=0), mosts, totals


@triton.jit
def _store_part(part_ptr, found, mosts, totals):
    """Store a part: values, then maximum and sum of each of a lane's queries."""
    lane = tl.arange(0, 32)
    COUNT: tl.constexpr = found.shape[1]
    tl.store(part_ptr + lane[:, None] * COUNT + tl.arange(0, COUNT)[None, :], found)
    for at in tl.static_range(len(mosts)):
        tl.store(part_ptr + 32 * (COUNT + 2 * at) + lane, mosts[at])
        tl.store(part_ptr + 32 * (COUNT + 2 * at + 1) + lane, totals[at])


@triton.jit
def _of_all_parts(
    parts_ptr, num_parts, found, totals, PART: tl.constexpr, MAX_PARTS: tl.constexpr,
    STEPS: tl.constexpr,
):  # fmt: skip
    """Values, maxima and sums of all parts, in the shapes of `found` and `totals`."""
    COUNT: tl.constexpr = found.shape[1]
    lane, place = tl.arange(0, 32), tl.arange(0, COUNT)[None, :]
    part = tl.arange(0, MAX_PARTS)[:, None]
    maxima, references, sums = (), (), ()
    for at in tl.static_range(len(totals)):
        # One round trip fetches those of all parts.
        of_part = parts_ptr + part * PART + 32 * (COUNT + 2 * at) + lane[None, :]
        is_part = part < num_parts
        mosts = tl.load(of_part, mask=is_part, other=float("-inf"), cache_modifier=".cg")
        of_parts = tl.load(of_part + 32, mask=is_part, other=0.0, cache_modifier=".cg")
        greatest = tl.max(mosts, axis=0)
        reference = tl.where(greatest == float("-inf"), 0.0, greatest)
        maxima, references = maxima + (greatest,), references + (reference,)
        sums = sums + (tl.sum(of_parts * tl.exp2(mosts - reference[None, :]), axis=0),)
    whole = tl.zeros([32, COUNT], tl.float32)
    for i in tl.range(0, num_parts, loop_unroll_factor=4):
        its_ptr = parts_ptr + i * PART
        values = tl.load(its_ptr + lane[:, None] * COUNT + place, cache_modifier=".cg")
        factors = ()
        for at in tl.static_range(len(totals)):
            most = tl.load(its_ptr + 32 * (COUNT + 2 * at) + lane, cache_modifier=".cg")
            factors = factors + (tl.exp2(most - references[at]),)
        whole += values * _of_query(factors, place, STEPS)
    return whole, maxima, sums


@triton.jit
def _second_third_exchanged(four):
    """Four 16-bit values in int64, ordered as `code_pairs_8` orders those of keys."""
    outer = four & -0x0000FFFFFFFF0001
    return outer | ((four & 0xFFFF0000) << 16) | ((four >> 16) & 0xFFFF0000)


@triton.jit
def _key_pairs(
    key_ptr, row, t, HEAD_DIM: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """A thread's dimensions of a key: two pairs for each step of sixteen."""
    if KIND == 3:
        return key_pairs_4(key_ptr, row, t, HEAD_DIM, dtype, PTX)
    else:
        pairs = ()
        for part in tl.static_range(HEAD_DIM // 64):
            at = row * (HEAD_DIM // 4) + 16 * part + 4 * t
            words = split_four(tl.load(key_ptr + at[:, None] + tl.arange(0, 4)[None, :]))
            for i in tl.static_range(4):
                pairs = pairs + code_pairs_8(words[i], KIND == 1, dtype, PTX)
        return pairs


@triton.jit
def _value_words(value_ptr, row, g, HEAD_DIM: tl.constexpr, KIND: tl.constexpr):
    """A thread's eighth of a key's values, four bytes to a word."""
    BYTES: tl.constexpr = HEAD_DIM // 2 if KIND == 3 else HEAD_DIM
    return words_of(value_ptr + row * (BYTES // 4), g, BYTES // 32)


@triton.jit
def _value_pairs(
    words, step: tl.constexpr, STEPS: tl.constexpr, KIND: tl.constexpr, dtype: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Two dimensions of four keys as the rows of a step: `words` has as many words of each key, in
    the order 2 t, 2 t + 1, 2 t + 8, 2 t + 9.
    """
    COUNT: tl.constexpr = STEPS // (4 if KIND == 3 else 2)
    WORD: tl.constexpr = step % (2 * COUNT) // 2
    pairs = ()
    for h in tl.static_range(2):
        even, odd = words[2 * h * COUNT + WORD], words[(2 * h + 1) * COUNT + WORD]
        # Bytes 0 and 1 of both, or 2 and 3.
        both = (even & 0xFFFF) | (odd << 16)
        if step % 2 == 1:
            both = ((even >> 16) & 0xFFFF) | (odd & -0x10000)
        if KIND == 3:
            pairs = pairs + numbers_of(both, 4 * (step // (2 * COUNT)), dtype, PTX)
        else:
            pairs = pairs + code_pairs_8(both, KIND == 1, dtype, PTX)
    return pairs


@triton.jit
def _half_as_many(values):
    """Join each tensor of the first half of the list with its counterpart in the second half."""
    pairs = ()
    for at in tl.static_range(len(values) // 2):
        pairs = pairs + (tl.join(values[at], values[at + len(values) // 2]),)
    return pairs


@triton.jit
def _joined(values):
    """A power of two of tensors [threads], as one [threads, 2, 2, …], in their order."""
    for _ in tl.static_range(log2(len(values))):
        values = _half_as_many(values)
    return values[0]


@triton.jit
def _of_query(of_queries, places, STEPS: tl.constexpr):
    """From tensors [32], one per query of a lane, those of the queries at `places`."""
    chosen = tl.where(places % 2 == 0, of_queries[0][:, None], of_queries[1][:, None])
    for n in tl.static_range(1, len(of_queries) // 2):
        others = tl.where(
            places % 2 == 0, of_queries[2 * n][:, None], of_queries[2 * n + 1][:, None]
        )
        chosen = tl.where(places // (4 * STEPS) == n, others, chosen)
    return chosen
