/* Attention of many rows, as in prefill: a tile of keys is transposed once, so that a product with
 * a row needs no sum across lanes; all rows read the tiles from the first-level cache. */

#pragma once

#include "attention_rows.h"

#if defined(__AVX__)
/* Transposes as many vectors as there are lanes: in rounds halves, quarters, … change places. The
 * orders are written out, since constants stay in registers. */
#define EXCHANGE(half, low, high)                                                     \
  for (int i = 0; i < LANES; i++)                                                     \
    if (!(i & half)) {                                                                \
      const f32v a = m[i], b = m[i + half];                                         \
      m[i] = PICK(a, b, low);                                    \
      m[i + half] = PICK(a, b, high);                            \
    }
#define ORDER(...) __VA_ARGS__
INLINE void transpose(f32v m[LANES]) {
#if LANES == 16
  EXCHANGE(8, ORDER(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
           ORDER(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  EXCHANGE(4, ORDER(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
           ORDER(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31))
  EXCHANGE(2, ORDER(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
           ORDER(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31))
  EXCHANGE(1, ORDER(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
           ORDER(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31))
#else
  EXCHANGE(4, ORDER(0, 1, 2, 3, 8, 9, 10, 11), ORDER(4, 5, 6, 7, 12, 13, 14, 15))
  EXCHANGE(2, ORDER(0, 1, 8, 9, 4, 5, 12, 13), ORDER(2, 3, 10, 11, 6, 7, 14, 15))
  EXCHANGE(1, ORDER(0, 8, 2, 10, 4, 12, 6, 14), ORDER(1, 9, 3, 11, 5, 13, 7, 15))
#endif
}
#undef EXCHANGE
#undef ORDER
#endif

/* Keys [KEY_TILE, dim] -> [KEY_TILE / LANES, dim, LANES]: as many keys side by side. */
INLINE void turn_tile(const float *tile, float *turned, const int vectors) {
  const int64_t dim = vectors * LANES;
  for (int64_t j = 0; j < KEY_TILE; j += LANES)
    for (int64_t i = 0; i < dim; i += LANES) {
      const float *from = tile + j * dim + i;
      float *to = turned + j * dim + i * LANES;
#if defined(__AVX__)
      f32v m[LANES];
      for (int k = 0; k < LANES; k++) m[k] = load(from + k * dim);
      transpose(m);
      for (int k = 0; k < LANES; k++) store(to + k * LANES, m[k]);
#else
      for (int k = 0; k < LANES; k++)
        for (int l = 0; l < LANES; l++) to[l * LANES + k] = from[k * dim + l];
#endif
    }
}

/* For four rows and keys side by side: the sums that score_few has in one lane. */
INLINE void lane_sums(const float *q, const float *k, const int vectors, int lane, f32v sums[4]) {
  for (int r = 0; r < 4; r++) sums[r] = splat(0.0f);
  for (int i = 0; i < vectors; i++) {
    const f32v keys = load(k + (i * LANES + lane) * LANES);
    for (int r = 0; r < 4; r++)
      sums[r] = fmav(splat(q[(r * vectors + i) * LANES + lane]), keys, sums[r]);
  }
}
/* Adds the lanes pairwise, in the order of sum_lanes: first those that are furthest apart. */
#define ADD_LANES(name, part, stride)                                                           \
  INLINE void name(const float *q, const float *k, const int vectors, int lane, f32v sums[4]) { \
    f32v others[4];                                                                           \
    part(q, k, vectors, lane, sums);                                                            \
    part(q, k, vectors, lane + stride, others);                                                 \
    for (int r = 0; r < 4; r++) sums[r] += others[r];                                           \
  }
ADD_LANES(add_2_lanes, lane_sums, LANES / 2)
ADD_LANES(add_4_lanes, add_2_lanes, LANES / 4)
#if LANES == 4
#define add_all_lanes add_4_lanes
#elif LANES == 8
ADD_LANES(add_all_lanes, add_4_lanes, 1)
#else
ADD_LANES(add_8_lanes, add_4_lanes, 2)
ADD_LANES(add_all_lanes, add_8_lanes, 1)
#endif

/* The scores of score_few, bit for bit, for a multiple of four rows and the first `high` keys of a
 * transposed tile. A vector of keys at a time for all rows: those stay in the first-level cache. */
INLINE void score_turned(const float *q, const float *turned, float *scores, int64_t rows,
                         int64_t high, const int vectors) {
  const int64_t dim = vectors * LANES;
  for (int64_t j = 0; j < high; j += LANES)
    for (int64_t r = 0; r < rows; r += 4) {
      f32v sums[4];
      add_all_lanes(q + r * dim, turned + j * dim, vectors, 0, sums);
      for (int i = 0; i < 4; i++) store(scores + (r + i) * KEY_TILE + j, sums[i]);
    }
}

/* total[r] = total[r] · keep[r] + weights[r] · v for four rows and `count` vectors of their width, whose
 * sums stay in registers. */
INLINE void add_values(const float *weights, const float *v, const float *keep, float *total,
                       int64_t low, int64_t high, int64_t dim, const int count) {
  f32v sums[4][MAX_DIM / LANES];
  for (int r = 0; r < 4; r++)
    for (int i = 0; i < count; i++) sums[r][i] = load(total + r * dim + i * LANES) * keep[r];
  for (int64_t j = low; j < high; j++)
    for (int i = 0; i < count; i++) {
      const f32v value = load(v + j * dim + i * LANES);
      for (int r = 0; r < 4; r++)
        sums[r][i] = fmav(splat(weights[r * KEY_TILE + j]), value, sums[r][i]);
    }
  for (int r = 0; r < 4; r++)
    for (int i = 0; i < count; i++) store(total + r * dim + i * LANES, sums[r][i]);
}

INLINE void fetch(const KVCache *c, const void *values, const float *scales, const int64_t *rows,
                  const Span *span, int64_t dim, float *tile) {
  for (int64_t j = span->low; j < span->high; j++)
    read_row(c, values, scales, rows[j], tile + j * dim);
}

INLINE void attend_many(const AttentionShape *s, const AttentionTask *task, const float *query,
                        float *out, const int vectors) {
  const KVCache *cache = &s->cache;
  Rows state;
  float tile[KEY_TILE * MAX_DIM] ALIGNED, turned[KEY_TILE * MAX_DIM] ALIGNED;
  int64_t rows[KEY_TILE];
  start_rows(s, task, query, 4, vectors, &state);
  const int64_t dim = state.dim;
  const int together = vectors % 4 == 0 ? 4 : vectors % 2 == 0 ? 2 : 1;
  memset(tile, 0, (size_t)(KEY_TILE * dim) * sizeof(float)); /* rows not fetched must be finite */
  Span span = seen_keys(s, task);
  for (int64_t first = span.start / KEY_TILE * KEY_TILE; first < span.end; first += KEY_TILE) {
    move_to(&span, first);
    if (span.low >= span.high) continue; /* all of its keys are hidden */
    find_rows(cache, task, &span, KEY_TILE, rows);
    fetch(cache, cache->keys, cache->key_scales, rows, &span, dim, tile);
    turn_tile(tile, turned, vectors);
    score_turned(state.q, turned, state.weights, state.padded_rows, span.high, vectors);
    weigh_rows(s, task, &span, &state);
    fetch(cache, cache->values, cache->value_scales, rows, &span, dim, tile);
    for (int64_t i = 0; i < dim; i += together * LANES)
      for (int64_t r = 0; r < state.padded_rows; r += 4)
        add_values(state.weights + r * KEY_TILE, tile + i, state.keep + r, state.total + r * dim + i,
                   span.low, span.high, dim, together);
  }
  finish_rows(s, task, &state, out);
}
